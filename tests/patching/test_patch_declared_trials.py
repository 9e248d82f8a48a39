"""What a trial of a declaration sees that a few rows of a new module would not show, and what it leaves alone."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfm_kernels as tfk
from tests.patching.attentions import HEADS, WIDTH
from tests.patching.declared_wrong import (
    Attention,
    CausalFromZero,
    DropsTwice,
    HalfFeedForward,
    HidesNumbers,
    Keys,
    Masked,
    Named,
    Offset,
    Sdpa,
    SwiGLU,
    TupleOfOne,
    Window,
    Wrapper,
    ZeroBias,
)  # fmt: skip
from tests.patching.models import assert_same_results
from tests.patching.test_patch_declaration import recipes  # noqa: F401

pytestmark = pytest.mark.usefixtures("recipes")
NAMES = dict(query="q", key="k", value="v", out="o", heads=HEADS)


def attention(cls, says, **declaration):
    return lambda: (tfk.patching.declare_attention(cls, **{**NAMES, **declaration}), cls())[1], says


def halves(cls, says, *args, **more):
    names = {"first": "w12", "gate": "w12", "second": "w3", "activation": "silu", **more}
    return lambda: (tfk.patching.declare_feed_forward(cls, **names), cls(*args))[1], says


def residual(change, says="other numbers: a pre-norm"):
    return lambda: (tfk.patching.declare_residual(Wrapper, norm="norm"), Wrapper(change))[1], says


REFUSED = {
    "sdpa's mask kept": attention(Sdpa, "other numbers with a mask: those of mask='sdpa'"),
    "hidden numbers added": attention(HidesNumbers, "got an error: it takes mask='hide'", mask="add"),
    "padding": attention(Keys, "must take a mask of mask='keep' and mask_axis=None, got an error: it takes mask_axis="),
    "bias of zero": attention(ZeroBias, "other numbers without a mask"),
    "output of zero": attention(CausalFromZero, "other numbers without a mask: those of causal=True"),
    "window": attention(Window, "other numbers of 70 tokens: a window"),
    "tuple of one": attention(TupleOfOne, "must give the result alone where weights=False, got a tuple of 1"),
    "named": attention(Named, r"must give a tuple \(result, weights\) where weights=True, got a Out", weights=True),
    "halves": halves(HalfFeedForward, r"must give w3\(silu\(a\) \* b, a and b = w12\(x\).chunk\(2, -1\)\), got other"),
    "layer scale": halves(SwiGLU, "got other numbers", True, out_dropout="drop"),
    "dropout's place": halves(SwiGLU, "in training must drop by 'drop' what is declared, got others", dropout="drop"),
    "half": residual(lambda m, x, f: m.norm(x + 0.5 * f(x))),
    "minus": residual(lambda m, x, f: m.norm(x - f(x))),
    "norm twice": residual(lambda m, x, f: m.norm(x + f(m.norm(x)))),
    "sum behind": residual(lambda m, x, f: m.norm(x) + f(x)),
    "dropout": residual(lambda m, x, f: m.norm(x + m.drop(f(x))), "must drop elements by no dropout alone"),
}  # fmt: skip
REFUSED["dropped twice"] = (
    lambda: (tfk.patching.declare_attention(DropsTwice, **NAMES, dropout="drop"), DropsTwice(bias=False))[1],
    "in training must drop by 'drop' what is declared, got others dropped",
)


@pytest.mark.parametrize("case", REFUSED)
def test_is_refused(case):
    torch.manual_seed(0)
    make, says = REFUSED[case]
    model = nn.Sequential(make())
    with pytest.raises(ValueError, match=rf"^declare_\w+: {type(model[0]).__name__}.forward .*{says}"):
        tfk.patch(model)


def test_norms_of_other_parameters_are_refused():
    tfk.patching.declare_rms_norm(Offset, eps=1e-6)
    with pytest.raises(ValueError, match=r"^declare_rms_norm: Offset.forward must give .*, got other numbers"):
        tfk.patch(nn.Sequential(Offset()))

    class Widening(Offset):
        def forward(self, x):
            return F.rms_norm(x.float(), (WIDTH,), eps=1e-6) * self.weight.float()

    tfk.patching.declare_rms_norm(Widening, eps=1e-6)
    with pytest.raises(ValueError, match="must give its input's torch.bfloat16, got torch.float32"):
        tfk.patch(nn.Sequential(Widening().bfloat16()))

    class Trained(Offset):
        def __init__(self):
            super().__init__()
            self.eps = nn.Parameter(torch.tensor(1e-6))

    tfk.patching.declare_rms_norm(Trained)
    with pytest.raises(ValueError, match="declare_rms_norm: eps must name a number, got 'eps', which is trained"):
        tfk.patch(nn.Sequential(Trained()))


def test_a_weight_that_is_no_row_is_left_to_the_forward():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, 1, WIDTH))

        def forward(self, x):
            return F.rms_norm(x, (WIDTH,), eps=1e-6) * self.weight

    tfk.patching.declare_rms_norm(Wide, eps=1e-6)
    model, x = nn.Sequential(Wide()), torch.randn(2, 3, WIDTH)
    wanted = model(x)
    with tfk.patch(model):
        assert torch.equal(model(x), wanted)


@pytest.mark.parametrize("kind", ["module", "number", "identity", "none"])
def test_dropout_in_any_form(kind):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
            made = {"module": nn.Dropout(0.5), "number": 0.5, "identity": nn.Identity(), "none": None}
            self.drop = made[kind]

        def forward(self, x):
            h = torch.relu(self.fc1(x))
            if isinstance(self.drop, float):
                return self.fc2(F.dropout(h, self.drop, self.training))
            return self.fc2(h if self.drop is None else self.drop(h))

    torch.manual_seed(0)
    tfk.patching.declare_feed_forward(Block, first="fc1", second="fc2", dropout="drop")
    model, x = nn.Sequential(Block()), torch.randn(4, WIDTH)
    with tfk.patch(model, backend="cpu") as report:
        assert "0" in {entry.name for entry in report.replaced}
        assert torch.equal(model(x), model(x)) is (kind in ("identity", "none"))
    assert_same_results(model.eval(), lambda m: m(x.to(m[0].fc1.weight)), backend="cpu")


@pytest.mark.parametrize("trained", [False, True])
def test_a_scale_that_is_a_tensor(trained):
    """A learned temperature's gradient, and graphs, which may not read a number."""

    class Scaled(Attention):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.3)) if trained else None
            if not trained:
                del self.scale
                self.register_buffer("scale", torch.tensor(0.3))

        def scores(self, x):
            return self.heads(self.q(x)) @ self.heads(self.k(x)).mT * self.scale

    torch.manual_seed(0)
    tfk.patching.declare_attention(Scaled, **NAMES, scale="scale", dropout="drop")
    model, x = nn.Sequential(Scaled()), torch.randn(2, 5, WIDTH)
    assert_same_results(model, lambda m: m(x.to(m[0].q.weight)), backend="cpu")
    wanted = model(x)
    with tfk.patch(model):
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), wanted)


def test_keys_and_values_of_one_projection():
    class Cross(nn.Module):
        def __init__(self, causal=False):
            super().__init__()
            self.to_q, self.to_kv, self.causal = nn.Linear(WIDTH, WIDTH), nn.Linear(10, 16), causal

        def forward(self, x, context, mask=None):
            k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.to_kv(context).chunk(2, -1))
            q = self.to_q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
            return y.transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    names = dict(query="to_q", kv="to_kv", out=None, heads=HEADS, kv_heads=2, mask="sdpa", causal="causal")
    tfk.patching.declare_attention(Cross, **names)
    model = nn.ModuleList([Cross(), Cross(True)])
    x, context = torch.randn(2, 5, WIDTH), torch.randn(2, 5, 10)
    run = lambda m: torch.stack([each(x.to(each.to_q.weight), context.to(each.to_q.weight)) for each in m])
    assert_same_results(model, run, backend="cpu")
    mask = torch.ones(5, 9, dtype=torch.bool).tril(4)
    longer = torch.randn(2, 9, 10)
    assert_same_results(model[0], lambda m: m(x.to(m.to_q.weight), longer.to(m.to_q.weight), mask), backend="cpu")


@pytest.mark.parametrize(
    "signature", ["x, context=None, mask=None", "mask, x", "q, k, attn_mask"], ids=lambda text: text.replace(" ", "")
)
def test_arguments_that_cannot_be_guessed(signature):
    scope = {}
    exec(f"def forward(self, {signature}): ...", scope)
    cls = type("Unclear", (Attention,), {"forward": scope["forward"]})
    names = tuple(re.findall(r"(\w+)(?:=None)?", signature.replace("=None", "")))
    wanted = f"arguments must say which of {names} Unclear.forward projects to queries, keys and values, got None"
    with pytest.raises(ValueError, match=re.escape(wanted)):
        tfk.patching.declare_attention(cls, **NAMES)


def test_arguments_around_a_mask():
    class Flags(Masked):
        def hidden(self, scores, mask):
            return scores.masked_fill(mask == 0, float("-inf"))

        def forward(self, x, mask=None, need_weights=False):
            return super().forward(x, mask)

    torch.manual_seed(0)
    tfk.patching.declare_attention(Flags, **NAMES, dropout="drop")
    model, x = nn.Sequential(Flags()), torch.randn(2, 5, WIDTH)
    wanted = model[0](x, torch.ones(5, 5).tril())
    with tfk.patch(model, backend="reference") as report:
        torch.testing.assert_close(model[0](x, torch.ones(5, 5).tril()), wanted)
        assert not report.fallbacks


def test_hooks_on_what_is_no_longer_called():
    """Attention rollout listens at the dropout, or at the softmax."""
    torch.manual_seed(0)
    tfk.patching.declare_attention(Attention, **NAMES, dropout="drop")
    model, x, seen = nn.Sequential(Attention()), torch.randn(2, 5, WIDTH), []
    model[0].softmax.register_forward_hook(lambda *args: seen.append("softmax"))
    with tfk.patch(model) as report:
        assert not seen and "softmax has hooks" in str(report)
        model(x)
        assert seen == ["softmax"]
    model[0].softmax._forward_hooks.clear()
    with tfk.patch(model) as report:
        handle = model[0].drop.register_forward_hook(lambda *args: seen.append("drop"))
        model(x)
        assert seen == ["softmax", "drop"] and report.fallbacks == {"0": {"drop has hooks": 1}}
        handle.remove()
        model[0].o.register_forward_hook(lambda *args: seen.append("o"))
        model(x)
        assert seen == ["softmax", "drop", "o"] and report.fallbacks == {"0": {"drop has hooks": 1}}


def test_neither_hooks_nor_state_nor_time_of_the_module_are_used():
    class Kept(Attention):
        def __init__(self):
            super().__init__()
            self.maps, self.counts, self.map = [], {"n": 0}, None

        def forward(self, x):
            self.maps.append(1)
            self.counts["n"] += 1
            self.map = self.softmax(self.scores(x))
            return super().forward(x)

    torch.manual_seed(0)
    tfk.patching.declare_attention(Kept, **NAMES, dropout="drop")
    model = nn.Sequential(Kept())
    model(torch.randn(2, 5, WIDTH)).sum().backward()  # the map is now of a graph, which no deepcopy takes
    nn.utils.parametrizations.spectral_norm(model[0].q)
    seen = []
    model[0].v.register_forward_hook(lambda *args: seen.append(1))
    before, kept = {name: t.clone() for name, t in model.state_dict().items()}, model[0].map
    with torch.device("meta"), torch.autocast("cpu"), tfk.patch(model) as report:
        assert "0" in {entry.name for entry in report.replaced}
    assert not seen and model[0].maps == [1] and model[0].counts == {"n": 1} and model[0].map is kept
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def notes(report):
    return {entry.name: entry.note for entry in report.entries}


CALLS = []  # what a function holds the trial would put back


def test_modules_that_are_alike_are_tried_once():
    class Counted(Attention):
        def __init__(self, scale=0.5, causal=False):
            super().__init__()
            self.scale = scale
            self.register_buffer("mask", torch.ones(5, 5).tril() if causal else torch.ones(5, 5))

        def scores(self, x):
            CALLS.append(self.scale)
            scores = self.heads(self.q(x)) @ self.heads(self.k(x)).mT * self.scale
            return scores if x.shape[1] > 5 else scores.masked_fill(self.mask == 0, float("-inf"))

    CALLS.clear()
    torch.manual_seed(0)
    tfk.patching.declare_attention(Counted, **NAMES, scale="scale", dropout="drop")
    tfk.patch(nn.Sequential(Counted()))
    one = len(CALLS)
    several = nn.Sequential(*(Counted() for _ in range(3)))
    for _ in range(2):  # patched as well
        CALLS.clear()
        tfk.patch(several)
        assert len(CALLS) == one > 0
    CALLS.clear()
    tfk.patch(nn.Sequential(Counted(), Counted(0.25)))
    assert len(CALLS) == 2 * one
    other = notes(tfk.patch(nn.Sequential(Counted(), Counted(causal=True))))["1"]
    assert "got other numbers without a mask: those of causal=True" in other


def test_a_compiled_forward_is_not_compiled_by_a_trial():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    class Compiled(Attention):
        forward = torch.compile(Attention.forward, backend=backend)

    tfk.patching.declare_attention(Compiled, **NAMES, dropout="drop")
    tfk.patch(nn.Sequential(Compiled()))
    assert not compiled


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_and_tuples_run_the_forward(layout):
    class Wrap(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x, sublayer):
            y = sublayer(x)
            return (self.norm(x + y[0]), y[1]) if isinstance(y, tuple) else self.norm(x + y)

    tfk.patching.declare_residual(Wrap, norm="norm")
    model, x = nn.ModuleList([Wrap()]), torch.randn(2, WIDTH)
    wanted = model[0](x, lambda t: (t, None))
    with tfk.patch(model):
        got = model[0](x, lambda t: (t, None))
    assert got[1] is None and torch.allclose(got[0], wanted[0])

    class First(Attention):
        def forward(self, x):
            return self.q(x) if x.is_nested else super().forward(x)

    tfk.patching.declare_attention(First, **NAMES, dropout="drop")
    model = nn.ModuleList([First()])
    nested = torch.nested.nested_tensor([torch.randn(3, WIDTH), torch.randn(5, WIDTH)], layout=layout)
    with torch.no_grad(), tfk.patch(model) as report:
        model[0](nested)
        assert report.fallbacks["0"] == {"its recipe does not serve this call": 1}
