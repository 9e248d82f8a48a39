"""MultiheadAttention: torch.nn's, option by option and mask by mask, forward and backward."""

import pytest
import torch
from torch import nn

import tfm_kernels as tfk

from .twins import BACKENDS, assert_same, label, pairwise, randn, results, twins

B, TQ, TK, E, H = 3, 5, 7, 12, 4
HIDE = torch.rand(B * H, TQ, TK, generator=torch.Generator().manual_seed(0)) < 0.3
HIDE[:, :, 0] = False
PAD = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0]]).bool()

ATTN_MASKS = {
    "none": lambda tq, tk: None,
    "bool": lambda tq, tk: HIDE[0, :tq, :tk],
    "float": lambda tq, tk: randn(tq, tk, seed=3).masked_fill(HIDE[1, :tq, :tk], -torch.inf),
    "heads": lambda tq, tk: HIDE[:, :tq, :tk],
    "heads float": lambda tq, tk: randn(B * H, tq, tk, seed=4).masked_fill(HIDE[:, :tq, :tk], -torch.inf),
    "causal": lambda tq, tk: torch.ones(tq, tk).triu(1).bool(),
    "causal hint": lambda tq, tk: torch.ones(tq, tk).triu(1).bool(),
}
PADDINGS = {
    "none": lambda tk: None,
    "bool": lambda tk: PAD[:, :tk],
    "float": lambda tk: randn(B, tk, seed=5).masked_fill(PAD[:, :tk], -torch.inf),
}


def inputs_of(kind, module, batch_first):
    x, memory = randn(B, TQ, E), randn(B, TK, E, seed=1)
    if kind == "self":
        given = [x, x, x]
    elif kind == "cross":
        given = [x, memory, memory]
    elif kind == "key is query":
        given = [x, x, randn(B, TQ, E, seed=2)]
    else:
        given = [x, randn(B, TK, module.kdim, seed=1), randn(B, TK, module.vdim, seed=2)]
    if batch_first:
        return given
    turned = {id(t): t.transpose(0, 1) for t in given}
    return [turned[id(t)] for t in given]


CASES = pairwise(
    backend=BACKENDS,
    dtype=[torch.float64, torch.float32],
    inputs=["self", "cross", "three", "widths", "key is query"],
    attn_mask=list(ATTN_MASKS),
    padding=list(PADDINGS),
    weights=["no", "average", "heads"],
    bias=[True, False],
    add_bias_kv=[False, True],
    add_zero_attn=[False, True],
    batch_first=[True, False],
    training=[True, False],
)


@pytest.mark.parametrize("case", CASES, ids=label)
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_is_torchs(case):
    hint = case["attn_mask"] == "causal hint"
    if hint and (case["add_bias_kv"] or case["add_zero_attn"]):
        case = {**case, "weights": "average"}  # without weights torch hides the added key behind the hint
    widths = {"kdim": 10, "vdim": 6} if case["inputs"] == "widths" else {}
    options = {name: case[name] for name in ("backend", "dtype", "bias", "add_bias_kv", "add_zero_attn", "batch_first")}
    theirs, ours = (m.train(case["training"]) for m in twins("MultiheadAttention", E, H, **options, **widths))
    keys = TQ if case["inputs"] in ("self", "key is query") else TK
    assert_same(
        theirs,
        ours,
        inputs_of(case["inputs"], theirs, case["batch_first"]),
        attn_mask=ATTN_MASKS[case["attn_mask"]](TQ, keys),
        key_padding_mask=PADDINGS[case["padding"]](keys),
        need_weights=case["weights"] != "no",
        average_attn_weights=case["weights"] == "average",
        is_causal=hint,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("masks", ["none", "plain", "heads"])
def test_unbatched(backend, weights, masks):
    theirs, ours = twins("MultiheadAttention", E, H, dtype=torch.float64, backend=backend)
    memory = randn(TK, E, seed=1)
    given = {}
    if masks != "none":
        given = {"attn_mask": HIDE[0] if masks == "plain" else HIDE[:H], "key_padding_mask": PAD[0]}
    assert_same(theirs, ours, [randn(TQ, E), memory, memory], need_weights=weights, **given)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_learned_float_mask_gets_its_gradient(backend):
    theirs, ours = twins("MultiheadAttention", E, H, dtype=torch.float64, batch_first=True, backend=backend)
    found = []
    for module in (theirs, ours):
        mask, x = randn(TQ, TQ).requires_grad_(), randn(B, TQ, E)
        (module(x, x, x, attn_mask=mask, need_weights=False)[0] * randn(B, TQ, E, seed=9)).sum().backward()
        found.append(mask.grad)
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weights", [True, False])
def test_rows_without_keys_give_zero_and_never_nan(backend, weights):
    module = tfk.nn.MultiheadAttention(E, H, batch_first=True, bias=False, dtype=torch.float64, backend=backend)
    x, pad = randn(B, TQ, E), torch.zeros(B, TQ, dtype=torch.bool)
    pad[1] = True
    hide = torch.zeros(TQ, TQ, dtype=torch.bool)
    hide[2] = True
    for module.training in (True, False):
        found = results(module, [x, x, x], key_padding_mask=pad, attn_mask=hide, need_weights=weights)
        assert all(t.isfinite().all() for t in found.values())
        assert not found["output 0"][1].any() and not found["output 0"][:, 2].any()
        assert found["output 0"][0, 0].all()
        if weights:
            assert not found["output 1"][1].any() and not found["output 1"][:, 2].any()
        with torch.no_grad():
            assert torch.equal(
                module(x, x, x, key_padding_mask=pad, attn_mask=hide, need_weights=weights)[0], found["output 0"]
            )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weights", [True, False])
def test_nan_in_padding_reaches_no_output(backend, weights):
    module = tfk.nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64, backend=backend).eval()
    x, memory = randn(B, TQ, E), randn(B, TK, E, seed=1)
    clean = module(x, memory, memory, key_padding_mask=PAD, need_weights=weights)
    memory = memory.masked_fill(PAD[..., None], torch.nan)
    dirty = module(x, memory, memory, key_padding_mask=PAD, need_weights=weights)
    seen = [torch.equal(a, b) for a, b in zip(clean, dirty, strict=True) if a is not None]
    assert PAD[0].any() and all(seen) and len(seen) == 1 + weights


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mask_object_says_what_torchs_tensor_says(backend):
    module = tfk.nn.MultiheadAttention(E, H, batch_first=True, add_zero_attn=True, dtype=torch.float64, backend=backend)
    for module.add_zero_attn in (False, True):
        x, memory = randn(B, TQ, E), randn(B, TK, E, seed=1)
        future = torch.ones(TQ, TK).triu(1).bool()
        expected = module(x, memory, memory, attn_mask=future, key_padding_mask=PAD)
        short = tfk.Mask.lengths(torch.tensor([3, 7, 7]))
        same = [
            {"attn_mask": tfk.Mask.causal(), "key_padding_mask": PAD},
            {"is_causal": True, "key_padding_mask": PAD},
            {"is_causal": True, "attn_mask": future, "key_padding_mask": PAD},
            {"attn_mask": tfk.Mask.causal() & tfk.Mask.hide(PAD[:, None, None])},
            {"attn_mask": tfk.Mask.hide(PAD[:, None, None]), "is_causal": True},
            {"attn_mask": tfk.Mask.causal() & short, "key_padding_mask": PAD},
        ]
        for options in same:
            for out, wanted in zip(module(x, memory, memory, **options), expected, strict=True):
                torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_dropout_in_training_is_in_the_weights_too(backend):
    """The returned weights are those that made the output, as torch returns them."""
    module = tfk.nn.MultiheadAttention(E, H, 0.5, batch_first=True, bias=False, dtype=torch.float64, backend=backend)
    module.out_proj.weight.data.copy_(torch.eye(E))
    x = randn(B, TQ, E)
    torch.manual_seed(3)
    out, weights = module(x, x, x, average_attn_weights=False)
    value = (x @ module.in_proj_weight[2 * E :].T).unflatten(-1, (H, E // H)).transpose(1, 2)
    torch.testing.assert_close((weights @ value).transpose(1, 2).flatten(-2), out)
    assert 0.2 < (weights == 0).double().mean() < 0.8
    torch.manual_seed(3)
    assert torch.equal(module(x, x, x, need_weights=False)[0], out)
    assert not torch.equal(module(x, x, x, need_weights=False)[0], out)
    module.eval()
    assert not (module(x, x, x)[1] == 0).any()


def test_named_backend_runs_or_says_why():
    x = randn(B, TQ, E, dtype=torch.float32)
    with pytest.raises(tfk.BackendError, match="attention"):
        tfk.nn.MultiheadAttention(E, H, backend="cuda")(x, x, x, need_weights=False)
    dropping = tfk.nn.MultiheadAttention(E, H, 0.1, backend="aten")
    with pytest.raises(tfk.BackendError, match="dropout"):
        dropping(x, x, x, need_weights=False)
    assert dropping.eval()(x, x, x)[0].shape == x.shape


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", [True, False])
def test_autocast_gives_torchs_dtypes_and_values(backend, dtype, weights):
    theirs, ours = twins("MultiheadAttention", E, H, add_bias_kv=True, add_zero_attn=True, backend=backend)
    x, mask = randn(TQ, B, E, dtype=torch.float32), randn(TQ, TQ, dtype=torch.float32)
    found = []
    for module in (theirs, ours):
        with torch.autocast("cpu", dtype=dtype):
            found.append(module(x, x, x, attn_mask=mask, need_weights=weights))
    for a, b in zip(*found, strict=True):
        if a is not None:
            assert a.dtype == b.dtype == dtype
            torch.testing.assert_close(a, b, rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shapes", [(0, TQ, TK), (B, 0, TK), (B, TQ, 0)])
def test_empty_inputs(backend, shapes):
    batch, queries, keys = shapes
    module = tfk.nn.MultiheadAttention(E, H, batch_first=True, bias=False, backend=backend)
    memory = randn(batch, keys, E, dtype=torch.float32)
    out, weights = module(randn(batch, queries, E, dtype=torch.float32), memory, memory)
    assert out.shape == (batch, queries, E) and weights.shape == (batch, queries, keys) and not out.any()


def test_projection_makes_as_few_products_as_the_inputs_allow():
    module = tfk.nn.MultiheadAttention(E, H, batch_first=True)
    x, memory = randn(B, TQ, E, dtype=torch.float32), randn(B, TK, E, dtype=torch.float32)
    for given, products in (((x, x, x), 1), ((x, memory, memory), 2), ((x, memory, memory.clone()), 3)):
        with torch.profiler.profile() as profile:
            module._project(*given)
        assert sum(event.count for event in profile.key_averages() if event.key == "aten::linear") == products


def test_an_output_projection_of_another_class_is_called():
    class Doubled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    module = tfk.nn.MultiheadAttention(E, H, batch_first=True)
    x = randn(B, TQ, E, dtype=torch.float32)
    before = module(x, x, x, need_weights=False)[0]
    module.out_proj.__class__ = Doubled
    assert torch.equal(module(x, x, x, need_weights=False)[0], 2 * before)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_two_floating_masks_are_summed_as_scores_are(backend, dtype):
    """Two of the least finite number leave every key seen, and all alike; torch's sum is -inf, and its weights NaN."""
    module = tfk.nn.MultiheadAttention(8, 2, batch_first=True, dtype=dtype, backend=backend)
    x, least = torch.randn(2, 4, 8, dtype=dtype), torch.finfo(dtype).min
    masks = {"attn_mask": torch.full((4, 4), least), "key_padding_mask": torch.full((2, 4), least)}
    _, weights = module(x, x, x, **{name: mask.to(dtype) for name, mask in masks.items()})
    assert (weights == 0.25).all()


def test_padding_of_what_has_no_batch_is_told_by_its_own_shape():
    x = randn(5, E).float()
    for wrong in (torch.zeros(1, 5) > 0, torch.zeros(4) > 0):
        with pytest.raises(ValueError, match=r"key_padding_mask must have shape \(5,\) to match \(Tk,\) of key, got"):
            tfk.nn.MultiheadAttention(E, H)(x, x, x, key_padding_mask=wrong)
    assert tfk.nn.MultiheadAttention(E, H)(x, x, x, key_padding_mask=torch.zeros(5) > 0)[0].shape == (5, E)


@pytest.mark.parametrize("masked", [False, True])
def test_weights_change_the_output_by_rounding_alone(masked):
    """The formula gives both on a CPU, where fused attention gives the output alone."""
    x, module = randn(2, 9, E).float(), tfk.nn.MultiheadAttention(E, H, batch_first=True)
    x[1, 4:] = torch.nan if masked else 0.0
    options = {"key_padding_mask": torch.arange(9) >= torch.tensor([[9], [4]])} if masked else {}
    out, weights = module(x[:, :4], x, x, **options, average_attn_weights=False)
    alone, nothing = module(x[:, :4], x, x, **options, need_weights=False)
    assert nothing is None and torch.isfinite(out).all()
    torch.testing.assert_close(out, alone)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, H, 4))


@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
def test_a_float32_mask_of_16_bit_inputs_is_not_rounded(name):
    """Distances times a slope: in bfloat16 those near 200 are steps of 1 apart."""
    x, module = randn(2, 9, 8).float(), tfk.nn.MultiheadAttention(8, 2, batch_first=True)
    far = 200.0 - 0.1371 * (torch.arange(9) - torch.arange(9)[:, None]).abs()
    mask = far if name == "attn_mask" else far[:2]
    wanted = module(x, x, x, **{name: mask}, need_weights=False)[0]
    out = module.bfloat16()(*[x.bfloat16()] * 3, **{name: mask}, need_weights=False)[0]
    assert (out.float() - wanted).norm() < 0.02 * wanted.norm()
