"""The judge's own float64 formulas against autograd of the written-out ones, and what a report says."""

import pytest
import torch

from tfm_kernels import Mask
from tfm_kernels.testing import ContractError, assert_contract, judge
from tfm_kernels.testing.judge import TRUTHS, eager_results

SEED = torch.tensor(5)


GENERATOR = torch.Generator().manual_seed(0)


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


def ends(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


TARGET = torch.tensor([[0, 3, 4, 1], [2, 2, 3, 0]])
MASK = Mask.causal() & Mask.lengths(torch.tensor([9, 0]))
CALLS = {
    "layer_norm": ("layer_norm", {"x": randn(3, 5, 7), "weight": randn(7), "bias": randn(7)}),
    "unbiased": ("layer_norm", {"x": randn(3, 5, 7), "weight": randn(7), "unbiased": True}),
    "add_layer_norm": (
        "add_layer_norm",
        {
            "x": randn(5, 7),
            "residual": randn(5, 7),
            "weight": randn(7),
            "bias": randn(7),
            "dropout_p": 0.3,
            "seed": SEED,
        },
    ),
    "dropout_rows": (
        "add_rms_norm",
        {
            "x": randn(5, 7),
            "residual": randn(5, 7),
            "dropout_p": 0.3,
            "seed": SEED,
            "dropout_rows": torch.arange(5) * 3,
        },
    ),
    "rms_norm": ("rms_norm", {"x": randn(5, 7), "weight": randn(7)}),
    "attention": (
        "attention",
        {
            **{
                "query": randn(2, 4, 7, 5),
                "key": randn(2, 2, 9, 5),
                "value": randn(2, 2, 9, 6),
                "bias": randn(2, 1, 7, 9),
            },
            **{"mask": MASK, "dropout_p": 0.3, "seed": SEED, "return_lse": True},
        },
    ),
    "plain attention": (
        "attention",
        {"query": randn(2, 4, 7, 5), "key": randn(2, 2, 9, 5), "value": randn(2, 2, 9, 6)},
    ),
    "varlen": (
        "attention_varlen",
        {
            **{"query": randn(12, 4, 5), "key": randn(14, 2, 5), "value": randn(14, 2, 6)},
            **{
                "cu_seqlens_q": ends(0, 3, 3, 10),
                "cu_seqlens_k": ends(0, 5, 7, 12),
                "max_seqlen_q": 8,
                "max_seqlen_k": 8,
            },
            **{"dropout_p": 0.2, "seed": SEED, "mask": Mask.causal("bottom_right"), "return_lse": True},
        },
    ),
    **{
        f"int8_linear {dynamic}": (
            "int8_linear",
            {
                **{"x": randn(2, 4, 6), "weight": (40 * randn(5, 6)).to(torch.int8), "scale": randn(5).abs().float()},
                **{"bias": randn(5), "dynamic": dynamic},
            },
        )
        for dynamic in (False, True)
    },
    **{
        f"rotary {interleaved}": (
            "rotary",
            {
                **{"x": randn(2, 3, 4, 7), "cos": randn(2, 4, 6), "sin": randn(2, 4, 6)},
                **{"interleaved": interleaved},
            },
        )
        for interleaved in (False, True)
    },
    "linear": ("linear", {"x": randn(2, 4, 6), "weight": randn(5, 6), "bias": randn(5)}),
    **{
        f"linear_cross_entropy {reduction} {smoothing}": (
            "linear_cross_entropy",
            {
                **{"x": randn(2, 4, 6), "weight": randn(5, 6), "target": TARGET, "bias": randn(5)},
                **{"ignore_index": 3, "label_smoothing": smoothing, "reduction": reduction},
            },
        )
        for reduction in ("mean", "sum", "none")
        for smoothing in (0.0, 0.2, 1.0)
    },
    **{
        f"ffn {activation} {gate is not None}": (
            "ffn",
            {
                **{"x": randn(2, 4, 6), "w1": randn(11, 6), "b1": randn(11), "w2": randn(5, 11), "b2": randn(5)},
                **{"activation": activation, "gate": gate, "dropout_p": 0.2, "seed": SEED},
            },
        )
        for activation in ("relu", "gelu", "gelu_tanh", "silu")
        for gate in (None, randn(11, 6))
    },
}


def results(op, inputs):
    """Outputs, gradients and output gradients of the eager formula, by autograd."""
    with torch.no_grad():
        outputs = TRUTHS[op].eager(op, inputs)
    if not inputs.get("return_lse", False):
        outputs.pop("lse", None)
    douts = {name: randn(*t.shape) for name, t in outputs.items()}
    wanted = {name: t for name, t in inputs.items() if isinstance(t, torch.Tensor) and t.is_floating_point()}
    found = eager_results(op, inputs, douts, wanted)
    return {name: found[name] for name in outputs}, {name: found[f"d{name}"] for name in wanted}, douts


@pytest.mark.parametrize("name", CALLS)
def test_truth_is_the_derivative_of_the_written_out_formula(name):
    op, inputs = CALLS[name]
    report = judge(op, inputs, *results(op, inputs)).raise_broken()
    assert {f"d{k}" for k, t in inputs.items() if isinstance(t, torch.Tensor) and t.is_floating_point()} <= set(
        report.worst
    )


@pytest.mark.parametrize("name", CALLS)
def test_a_single_wrong_element_is_named(name):
    op, inputs = CALLS[name]
    outputs, grads, douts = results(op, inputs)
    last = list(grads)[-1]
    grads[last] = grads[last].clone()
    grads[last].view(-1)[-1] += 1e-6
    report = judge(op, inputs, outputs, grads, douts, backend="planted")
    with pytest.raises(
        ContractError, match=f"{op}: backend 'planted' on .*d{last}: C1 broken, error / bound = .*at \\["
    ):
        report.raise_broken()


def test_wrong_form_and_nan_are_named():
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    y = torch.nn.functional.layer_norm(x, (8,))
    assert judge("layer_norm", {"x": x}, {"y": y}).passed
    with pytest.raises(ContractError, match="y: form broken.*dtype must be torch.bfloat16, got torch.float32"):
        judge("layer_norm", {"x": x}, {"y": y.float()}).raise_broken()
    with pytest.raises(ContractError, match="y: form broken.*shape"):
        judge("layer_norm", {"x": x}, {"y": y.T}).raise_broken()
    y[1, 2] = torch.nan
    with pytest.raises(ContractError, match=r"y: placement broken.*at \[1, 2\]: got nan"):
        judge("layer_norm", {"x": x}, {"y": y}).raise_broken()


def test_what_is_ignored_is_exactly_nothing():
    op, inputs = CALLS["linear_cross_entropy none 0.2"]
    outputs, grads, douts = results(op, inputs)
    for place in (outputs["loss"], grads["x"]):
        place[0, 1] += 1e-30
        assert {finding.rule for finding in judge(op, inputs, outputs, grads, douts).broken} == {"placement"}
        place[0, 1] = 0
    judge(op, inputs, outputs, grads, douts).raise_broken()


def test_losses_are_not_of_16_bits():
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    inputs = {"x": x, "weight": torch.randn(5, 8).bfloat16(), "target": torch.tensor([4, 0, 1])}
    loss = TRUTHS["linear_cross_entropy"].eager("linear_cross_entropy", inputs)["loss"].bfloat16()
    with pytest.raises(ContractError, match="loss: form broken.*dtype must be torch.float32, got torch.bfloat16"):
        judge("linear_cross_entropy", inputs, {"loss": loss}).raise_broken()


def test_unknown_names_are_refused():
    x = torch.randn(3, 8)
    with pytest.raises(ValueError, match="op must be one of layer_norm, .*, got 'softmax'"):
        judge("softmax", {"x": x}, {"y": x})
    with pytest.raises(ValueError, match="outputs must hold 'y', got out"):
        judge("layer_norm", {"x": x}, {"out": x})
    with pytest.raises(ValueError, match="no rule for 'rstd'"):
        judge("layer_norm", {"x": x}, {"y": x, "rstd": x})


def test_inputs_of_the_contract_are_named_arguments():
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(TypeError, match="inputs must be a mapping of attention's arguments by name, got tuple$"):
        assert_contract("attention", (q, q), "cpu")
    with pytest.raises(ValueError, match="inputs of attention must hold 'query', got 'key', 'value'$"):
        assert_contract("attention", {"key": q, "value": q}, "cpu")
