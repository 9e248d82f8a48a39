"""Bad calls of ffn, written out: each is refused before a backend is chosen, in one sentence."""

import math

import pytest
import torch

import tfm_kernels as tfk

GOOD = {
    "x": torch.randn(2, 3, 8),
    "w1": torch.randn(12, 8),
    "b1": torch.randn(12),
    "w2": torch.randn(8, 12),
    "b2": torch.randn(8),
}
META = {name: t.to("meta") for name, t in GOOD.items()}
GATE = torch.randn(12, 8)

# what is changed in GOOD, and what the sentence must say
WRONG_VALUES = [
    ({"x": torch.tensor(1.0)}, "x must have shape (..., E), got ()"),
    ({"x": torch.randn(2, 3, 7)}, "w1 must have shape (12, 7) to match x (2, 3, 7), got (12, 8)"),
    ({"x": torch.randn(8, 2)}, "w1 must have shape (12, 2) to match x (8, 2), got (12, 8)"),
    ({"x": torch.randn(0)}, "w1 must have shape (12, 0) to match x (0,), got (12, 8)"),
    ({"w1": torch.randn(8, 12)}, "w1 must have shape (8, 8) to match x (2, 3, 8), got (8, 12)"),
    ({"w1": torch.randn(8)}, "w1 must have shape (F, E), got (8,)"),
    ({"w1": torch.randn(12, 8, 1)}, "w1 must have shape (F, E), got (12, 8, 1)"),
    ({"w1": torch.tensor(2.0)}, "w1 must have shape (F, E), got ()"),
    ({"w1": torch.randn(13, 8)}, "w2 must have shape (8, 13) to match w1 (13, 8), got (8, 12)"),
    ({"w1": torch.randn(0, 8)}, "w2 must have shape (8, 0) to match w1 (0, 8), got (8, 12)"),
    ({"w2": torch.randn(12, 8)}, "w2 must have shape (12, 12) to match w1 (12, 8), got (12, 8)"),
    ({"w2": torch.randn(12)}, "w2 must have shape (Eo, F), got (12,)"),
    ({"w2": torch.randn(1, 8, 12)}, "w2 must have shape (Eo, F), got (1, 8, 12)"),
    ({"w2": torch.randn(8, 11)}, "w2 must have shape (8, 12) to match w1 (12, 8), got (8, 11)"),
    ({"w2": torch.randn(7, 12)}, "b2 must have shape (7,) to match w2 (7, 12), got (8,)"),
    ({"b1": torch.randn(8)}, "b1 must have shape (12,) to match w1 (12, 8), got (8,)"),
    ({"b1": torch.randn(1, 12)}, "b1 must have shape (12,) to match w1 (12, 8), got (1, 12)"),
    ({"b1": torch.tensor(0.0)}, "b1 must have shape (12,) to match w1 (12, 8), got ()"),
    (
        {"gate": GATE, "b1": torch.randn(8)},
        "(12,) to match w1 (12, 8), or (24,) with the bias of the gate, got (8,)",
    ),
    ({"b1": torch.randn(24)}, "b1 must have shape (12,) to match w1 (12, 8), got (24,)"),
    ({"b2": torch.randn(12)}, "b2 must have shape (8,) to match w2 (8, 12), got (12,)"),
    ({"b2": torch.randn(1)}, "b2 must have shape (8,) to match w2 (8, 12), got (1,)"),
    ({"gate": torch.randn(8, 12)}, "gate must have shape (12, 8) to match w1 (12, 8), got (8, 12)"),
    ({"gate": torch.randn(12, 7)}, "gate must have shape (12, 8) to match w1 (12, 8), got (12, 7)"),
    ({"gate": torch.randn(12)}, "gate must have shape (12, 8) to match w1 (12, 8), got (12,)"),
    ({"x": GOOD["x"].long()}, "x must be float16, bfloat16, float32 or float64, got int64"),
    ({"x": GOOD["x"] > 0}, "x must be float16, bfloat16, float32 or float64, got bool"),
    ({"x": GOOD["x"].to(torch.complex64)}, "x must be float16, bfloat16, float32 or float64, got complex64"),
    ({"w1": GOOD["w1"].to(torch.float8_e4m3fn)}, "w1 must be float16, bfloat16, float32 or float64, got float8"),
    ({"w2": GOOD["w2"].to(torch.int8)}, "w2 must be float16, bfloat16, float32 or float64, got int8"),
    ({"b1": GOOD["b1"].int()}, "b1 must be float16, bfloat16, float32 or float64, got int32"),
    ({"b2": GOOD["b2"].short()}, "b2 must be float16, bfloat16, float32 or float64, got int16"),
    ({"gate": GATE.to(torch.uint8)}, "gate must be float16, bfloat16, float32 or float64, got uint8"),
    ({"x": GOOD["x"].double()}, "must have one dtype, got x float64, w1 float32"),
    ({"x": GOOD["x"].bfloat16()}, "must have one dtype, got x bfloat16, w1 float32"),
    ({"w1": GOOD["w1"].half()}, "x float32, w1 float16, b1 float32"),
    ({"b1": GOOD["b1"].double()}, "x float32, w1 float32, b1 float64"),
    ({"w2": GOOD["w2"].bfloat16()}, "w2 bfloat16"),
    ({"b2": GOOD["b2"].half()}, "b2 float16"),
    ({"gate": GATE.double()}, "gate float64"),
    ({"x": META["x"]}, "must be on one device, got x on meta (float32), w1 on cpu (float32)"),
    ({"w1": META["w1"]}, "w1 on meta"),
    ({"b1": META["b1"]}, "b1 on meta"),
    ({"w2": META["w2"]}, "w2 on meta"),
    ({"b2": META["b2"]}, "b2 on meta"),
    ({"gate": GATE.to("meta")}, "gate on meta"),
    ({"x": GOOD["x"].to_sparse()}, "x must be a dense tensor, got layout torch.sparse_coo"),
    ({"w1": GOOD["w1"].to_sparse()}, "w1 must be a dense tensor"),
    ({"activation": "tanh"}, "activation must be one of relu, gelu, gelu_tanh, silu, got 'tanh'"),
    ({"activation": "GELU"}, "activation must be one of relu, gelu, gelu_tanh, silu, got 'GELU'"),
    ({"activation": ""}, "activation must be one of relu, gelu, gelu_tanh, silu, got ''"),
    ({"activation": None}, "activation must be one of relu, gelu, gelu_tanh, silu, got None"),
    ({"activation": 1}, "activation must be one of relu, gelu, gelu_tanh, silu, got 1"),
    ({"dropout_p": -0.1}, "dropout_p must lie in [0, 1], got -0.1"),
    ({"dropout_p": 1.01}, "dropout_p must lie in [0, 1], got 1.01"),
    ({"dropout_p": math.nan}, "dropout_p must lie in [0, 1], got nan"),
    ({"dropout_p": math.inf}, "dropout_p must lie in [0, 1], got inf"),
    (
        {"dropout_p": 0.5, "seed": torch.tensor([1])},
        "seed must be an int64 tensor of shape (), got int64 of shape (1,)",
    ),
    ({"dropout_p": 0.5, "seed": torch.tensor(1.0)}, "seed must be an int64 tensor of shape (), got float32"),
    ({"seed": torch.tensor(1, dtype=torch.int32)}, "seed must be an int64 tensor of shape (), got int32"),
    ({"dropout_p": 0.5, "seed": torch.tensor(1, device="meta")}, "seed must be on cpu, the call's device, got meta"),
    ({"dropout_rows": torch.arange(5)}, "dropout_rows must be an int64 tensor of shape (6,), got int64 of shape (5,)"),
    ({"dropout_rows": torch.arange(6).view(2, 3)}, "dropout_rows must be an int64 tensor of shape (6,)"),
    ({"dropout_rows": torch.arange(6).int()}, "dropout_rows must be an int64 tensor of shape (6,), got int32"),
    ({"dropout_rows": torch.arange(6.0)}, "dropout_rows must be an int64 tensor of shape (6,), got float32"),
    ({"dropout_rows": torch.arange(6, device="meta")}, "dropout_rows on meta"),
    ({"backend": "gpu"}, "backend must be one of reference, aten, cpu, triton, cuda or None, got 'gpu'"),
    ({"backend": "CPU"}, "backend must be one of reference, aten, cpu, triton, cuda or None, got 'CPU'"),
]
WRONG_KINDS = [
    ({"x": None}, "x must be a tensor, got NoneType"),
    ({"x": [[1.0] * 8]}, "x must be a tensor, got list"),
    ({"x": 3.0}, "x must be a tensor, got float"),
    ({"w1": None}, "w1 must be a tensor, got NoneType"),
    ({"w1": torch.nn.Linear(8, 12)}, "w1 must be a tensor, got Linear"),
    ({"w2": None}, "w2 must be a tensor, got NoneType"),
    ({"w2": "w2"}, "w2 must be a tensor, got str"),
    ({"b1": False}, "b1 must be a tensor or None, got bool"),
    ({"b1": 0.0}, "b1 must be a tensor or None, got float"),
    ({"b2": True}, "b2 must be a tensor or None, got bool"),
    ({"gate": torch.sigmoid}, "gate must be a tensor or None, got builtin_function_or_method"),
    ({"dropout_p": "0.1"}, "dropout_p must be a number, got str"),
    ({"dropout_p": None}, "dropout_p must be a number, got NoneType"),
    ({"dropout_p": True}, "dropout_p must be a number, got bool"),
    ({"dropout_p": torch.tensor(0.1)}, "dropout_p must be a number, got Tensor"),
    ({"dropout_p": 0.5, "seed": 7}, "seed must be a tensor or None, got int"),
    ({"seed": torch.Generator()}, "seed must be a tensor or None, got Generator"),
    ({"dropout_rows": [0, 1, 2, 3, 4, 5]}, "dropout_rows must be a tensor or None, got list"),
    ({"recompute": 1}, "recompute must be a bool, got int"),
    ({"recompute": None}, "recompute must be a bool, got NoneType"),
]


@pytest.mark.parametrize("backend", [None, "cpu", "reference"])
@pytest.mark.parametrize(
    ("change", "sentence", "error"),
    [(*case, ValueError) for case in WRONG_VALUES] + [(*case, TypeError) for case in WRONG_KINDS],
)
def test_refused_in_one_sentence(change, sentence, error, backend):
    with pytest.raises(error) as caught:
        tfk.ops.ffn(**{**GOOD, "backend": backend, **change})
    message = str(caught.value)
    assert message.startswith("ffn: ") and sentence in message and "\n" not in message and len(message) < 300


def test_the_good_call_is_good():
    assert tfk.ops.ffn(**GOOD).shape == (2, 3, 8)
    assert len(WRONG_VALUES) + len(WRONG_KINDS) >= 60


def test_a_named_backend_runs_or_explains():
    for name in ("triton", "cuda"):
        with pytest.raises(tfk.BackendError, match=f"ffn: backend '{name}' cannot run this call"):
            tfk.ops.ffn(**GOOD, backend=name)
    with pytest.raises(tfk.BackendError, match="needs a CPU tensor, got meta"):
        tfk.ops.ffn(**META, backend="cpu")
    assert tfk.ops.ffn(**META).shape == (2, 3, 8)


def test_explain_names_every_backend():
    text = tfk.explain("ffn", **GOOD, activation="silu", gate=GATE)
    for name in ("reference", "aten", "cpu", "triton", "cuda", "->"):
        assert name in text
