"""ffn's Triton kernels, interpreted: the numeric contract, every tile, cut sums, dropout masks, refusals."""

import pytest
import torch

import tfm_kernels as tfk
from tests.cases import CASES, report_case
from tfm_kernels import _library, dropout
from tfm_kernels.ops.ffn import BWD, FWD
from tfm_kernels.testing import assert_contract, exact, invariance
from tfm_kernels.testing.derivative import assert_opcheck
from tfm_kernels.triton import _gemm, _launch, ffn_bwd, ffn_fwd

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEED = torch.tensor(2**40 + 20261121)
FFN = [case for case in CASES if case.op == "ffn" and case.levels["dtype"] != "f64"]


def steps(case):
    """Tiles of the call's products times their steps along k, about: what the interpreter's time follows."""
    size, eo = case.levels, case.levels["e"] if case.levels["eo"] == "same" else case.levels["eo"]
    rows, deep = torch.Size(size["rows"]).numel(), 16 if size["dtype"] == "f32" else 64
    tile = 64 if deep == 64 or not (size["e"] % 8 or size["f"] % 8 or eo % 8) else 32
    count = lambda n, by=tile: -(-n // by)
    m, e, f, o = count(rows), count(size["e"]), count(size["f"]), count(eo)
    forward = m * f * count(size["e"], deep) + m * o * count(size["f"], deep)
    return (forward + m * f * count(eo, deep) + f * (e + o) * count(rows, deep)) * (1 + size["gate"])


def marked(case):
    return pytest.param(case, id=case.id, marks=pytest.mark.slow if steps(case) > 45 else ())


@pytest.mark.parametrize("case", [marked(case) for case in FFN])
def test_contract(case):
    report_case(case, "triton").raise_broken()


def test_there_are_enough_cases():
    quick = [case for case in FFN if not marked(case).marks]
    assert len(quick) >= 150 and len(FFN) >= 260
    for factor in ("dtype", "activation", "gate", "b1", "b2", "dropout_p", "layout", "data", "recompute"):
        assert {case.levels[factor] for case in quick} == {case.levels[factor] for case in FFN}, factor


def randn(*shape, dtype=torch.float32, seed=0, scale=1.0):
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def block(rows, width, hidden, out, dtype=torch.float32, gated=False):
    """A call with everything."""
    spread = 1.5 / width**0.5
    given = {
        "x": randn(rows, width, dtype=dtype), "w1": randn(hidden, width, dtype=dtype, seed=1, scale=spread),
        "b1": randn(hidden, dtype=dtype, seed=2), "w2": randn(out, hidden, dtype=dtype, seed=3, scale=hidden**-0.5),
        "b2": randn(out, dtype=dtype, seed=4), "dropout_p": 0.2, "seed": SEED, "activation": "gelu",
    }  # fmt: skip
    return given | ({"gate": randn(hidden, width, dtype=dtype, seed=5, scale=spread)} if gated else {})


@pytest.fixture
def launches(monkeypatch):
    """The Configs that the calls of a test were launched with."""
    seen = set()

    def watch(module, name):
        pick = getattr(module, name)

        def keep(*args):
            config = pick(*args)
            seen.add((module.__name__.split(".")[-1], config.block_m, config.block_n, config.splits > 1))
            return config

        monkeypatch.setattr(module, name, keep)

    for module in (_gemm, ffn_fwd, ffn_bwd):
        watch(module, "pick_config")
    watch(_gemm, "pick_split")
    return seen


FEW = [(torch.bfloat16, True), (torch.float32, False)]
REST = [(torch.bfloat16, False), (torch.float32, True), (torch.float16, False), (torch.float16, True)]


@pytest.mark.parametrize("dtype, gated", [*FEW, *(pytest.param(*p, marks=pytest.mark.slow) for p in REST)], ids=str)
def test_largest_tiles_and_few_programs(dtype, gated, launches, monkeypatch):
    """A GPU of one multiprocessor takes the largest tile, and several to a program."""
    monkeypatch.setattr(_launch, "MULTIPROCESSORS", {9: 1})
    assert_contract("ffn", block(200, 40, 320, 72, dtype, gated), "triton")
    wide = 128 if dtype == torch.float32 else 256
    first = (64, 128) if dtype != torch.float32 else (128, 128)
    assert launches == {
        ("_gemm", 128, wide, False), ("ffn_fwd", 128, 64 if gated else 128, False), ("ffn_bwd", *first, False)
    }  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cut_sums(dtype, launches, monkeypatch):
    """Weights' gradients over more rows than one part holds, the last one shorter."""
    monkeypatch.setattr(_gemm, "LEAST_K", 64)
    assert_contract("ffn", block(300, 16, 24, 8, dtype, gated=True), "triton")
    assert ("_gemm", 128, 128, True) in launches


def test_sums_over_many_rows():
    """db2 by several programs, whose sums are added by a second launch."""
    assert_contract("ffn", block(1100, 8, 8, 8, torch.bfloat16), "triton")


def test_small_integers_are_exact():
    for dtype in DTYPES:
        exact.assert_exact("ffn", exact.integers("ffn", dtype, "cpu", 3), "triton", backward=True)


@pytest.mark.parametrize("hidden", [7, 64, 130])
@pytest.mark.parametrize("p", [2.0**-33, 0.1, 0.9999, 1.0])
def test_dropout_masks_are_those_of_the_other_backends(hidden, p):
    """Everything is 1 up to the hidden activation, and what is behind it is the identity."""
    rows = torch.cat([torch.arange(69), torch.tensor([2**33 + 7])])
    keep = dropout.keep_mask(SEED, p, rows, hidden)
    eye = torch.eye(hidden)

    def masks(backend):
        x = torch.ones(70, hidden, requires_grad=True)
        options = {"dropout_p": p, "seed": SEED, "dropout_rows": rows, "backend": backend}
        y = tfk.ops.ffn(x, eye, None, eye, None, **options)
        (dx,) = torch.autograd.grad(y.sum(), x)
        return y != 0, dx != 0

    for backend in ("triton", "cpu", "reference"):
        assert all(torch.equal(mask, keep) for mask in masks(backend)), backend


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_give_the_bits_of_contiguous_tensors(dtype):
    invariance.assert_view_equals_contiguous("ffn", block(9, 40, 24, 16, dtype, gated=True), "triton")


@pytest.mark.parametrize("sizes", [(0, 4, 5, 6), (4, 0, 5, 6), (4, 3, 0, 6), (4, 3, 5, 0), (0, 0, 0, 0)])
@pytest.mark.parametrize("recompute", [False, True])
def test_nothing_of_something(sizes, recompute):
    """Sums over nothing are 0, and so are their gradients: as the reference has it."""
    rows, width, hidden, out = sizes
    shapes = {"x": (rows, width), "w1": (hidden, width), "b1": (hidden,), "w2": (out, hidden), "b2": (out,)}

    def run(backend):
        leaves = {name: randn(*s, seed=i).requires_grad_() for i, (name, s) in enumerate(shapes.items())}
        y = tfk.ops.ffn(**leaves, activation="gelu", recompute=recompute, backend=backend)
        return y, *torch.autograd.grad(y.sum(), list(leaves.values()))

    for found, expected in zip(run("triton"), run("reference"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("gated", [False, True])
def test_any_subset_of_gradients(gated):
    """What is not asked for changes nothing."""
    given = block(33, 20, 70, 18, gated=gated)
    leaves = [name for name, t in given.items() if isinstance(t, torch.Tensor) and t.is_floating_point()]

    def run(names):
        inputs = {name: t.clone().requires_grad_() if name in names else t for name, t in given.items()}
        y = tfk.ops.ffn(**inputs, backend="triton")
        return dict(zip(names, torch.autograd.grad(y, [inputs[name] for name in names], randn(33, 18)), strict=True))

    everything = run(leaves)
    for name in leaves:
        assert torch.equal(run([name])[name], everything[name]), name


@pytest.mark.parametrize("gated", [False, True])
def test_opcheck(gated):
    checked = assert_opcheck("ffn", block(9, 20, 33, 12, gated=gated), "triton")
    assert checked == ["tfm_kernels::ffn_fwd_triton", "tfm_kernels::ffn_bwd_triton"]


def test_a_direct_call_is_checked():
    x, w1, w2 = randn(3, 4), randn(5, 4), randn(4, 5)
    for bad, words in (
        ((x, randn(5, 3), None, w2, None, None, 0, 0.0, None, None, False), "w1 must have shape"),
        ((x, w1, None, randn(4, 6), None, None, 0, 0.0, None, None, False), "w2 must have shape"),
        ((x, w1, randn(4), w2, None, None, 0, 0.0, None, None, False), "b1 must have shape"),
        ((x, w1, None, w2, randn(5), None, 0, 0.0, None, None, False), "b2 must have shape"),
        ((x, w1, None, w2, None, randn(5, 5), 0, 0.0, None, None, False), "gate must have shape"),
        ((x, w1.half(), None, w2, None, None, 0, 0.0, None, None, False), "w1 must be one of"),
        ((x.double(), w1.double(), None, w2.double(), None, None, 0, 0.0, None, None, False), "x must be one of"),
        ((x, w1, None, w2, None, None, 4, 0.0, None, None, False), "activation must lie in 0..3"),
        ((x, w1, None, w2, None, None, 0, 0.5, None, None, False), "seed must be a tensor"),
        ((x, w1, None, w2, None, None, 0, 0.5, SEED, torch.arange(2), False), "dropout_rows must have shape"),
        ((x[0], w1, None, w2, None, None, 0, 0.0, None, None, False), "x must have 2 dimensions"),
    ):
        with pytest.raises(ValueError, match=f"ffn_fwd_triton: {words}"):
            FWD["triton"](*bad)
    every = (True,) * 5
    for dy, preact, need_gate, words in (
        (randn(3, 5), torch.empty(0), False, "dy must have shape"),
        (randn(3, 4), torch.empty(3, 6), False, "preact must have shape"),
        (randn(3, 4), torch.empty(0), True, "need_gate must be False without a gate"),
    ):
        with pytest.raises(ValueError, match=f"ffn_bwd_triton: {words}"):
            BWD["triton"](dy, x, w1, None, w2, None, preact, 0, 0.0, None, None, *every, need_gate)


def test_what_it_cannot_run():
    with pytest.raises(tfk.BackendError, match="has no float64 kernels"):
        tfk.ops.ffn(
            *(t.double() for t in (randn(2, 3), randn(4, 3))), None, randn(3, 4).double(), None, backend="triton"
        )
    assert _library.triton_interprets() and "-> triton" not in tfk.explain(
        "ffn", randn(2, 3), randn(4, 3), None, randn(3, 4), None
    )
