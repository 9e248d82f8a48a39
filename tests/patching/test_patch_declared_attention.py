"""Attention as people write it today, declared in a line, and what a trial says of a declaration that is wrong."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfm_kernels as tfk
from tests.patching.attentions import (
    CROSS,
    GROUPED,
    HEADS,
    IMAGE,
    NANO,
    PRE_NORM,
    WIDTH,
    CausalSelfAttention,
    Cross,
    FlashAttention,
    GroupedAttention,
    ImageAttention,
    PreNormAttention,
)  # fmt: skip
from tests.patching.models import assert_same_results, compare, results
from tests.patching.test_patch_declaration import ANNOTATED, MultiHeadedAttention, recipes  # noqa: F401
from tests.patching.test_patch_recipe import AttentionWithWeights, MultiHeadAttention

pytestmark = pytest.mark.usefixtures("recipes")


def rows(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def band(length):
    return torch.ones(length, length, dtype=torch.bool).tril(1).triu(-2)


CASES = {  # class, its declaration, arguments of calls beyond the first rows
    "nanoGPT": (CausalSelfAttention, NANO, [()]),
    "nanoGPT without bias": (lambda: CausalSelfAttention(bias=False), NANO, [()]),
    "nanoGPT, SDPA": (FlashAttention, {**NANO, "dropout": "dropout"}, [()]),
    "timm": (ImageAttention, IMAGE, [(), (band(7),), (rows(3, 1, 7, 7),)]),
    "grouped": (GroupedAttention, GROUPED, [(), (torch.arange(7) >= torch.tensor([4, 7, 2])[:, None],)]),
    "vit-pytorch": (PreNormAttention, PRE_NORM, [()]),
    "one head of keys": (lambda: GroupedAttention(1), {**GROUPED, "kv_heads": 1}, [()]),
    "cross": (Cross, CROSS, [(rows(3, 5, 10), rows(3, 7, WIDTH)), (rows(3, 5, 10), rows(3, 7, WIDTH), rows(7, 5))]),
}


def declared(cls, declaration):
    module = cls()
    tfk.patching.declare_attention(type(module), **declaration)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("case", CASES)
def test_declared_in_a_line(case, backend):
    torch.manual_seed(0)
    cls, declaration, calls = CASES[case]
    model = nn.ModuleList([declared(cls, declaration)])
    first = rows(3, 5, 6) if case == "cross" else rows(3, 7, WIDTH)
    for more in calls:
        cast = lambda t, m: t.to(next(m.parameters())) if t.is_floating_point() else t
        run = lambda m, more=more: m[0](*(cast(t, m) for t in (first, *more)))
        assert_same_results(model, run, backend=backend)
    with tfk.patch(model) as report:
        run(model)
        assert "0" in {entry.name for entry in report.replaced} and not report.fallbacks


@pytest.mark.parametrize("name", ["causal", "timm"])
def test_dropout_of_weights_and_of_the_result(name):
    """Which positions are dropped is ours; how many, and by what factor the others grow, is the forward's."""
    torch.manual_seed(0)
    cls, declaration = (CausalSelfAttention, NANO) if name == "causal" else (ImageAttention, IMAGE)
    tfk.patching.declare_attention(cls, **declaration)
    model, x = cls(0.5), torch.randn(64, 32, WIDTH)
    for layer in (p for p in model.modules() if isinstance(p, nn.Linear)):
        nn.init.normal_(layer.weight, std=0.3)
    with torch.no_grad():
        stock = model(x)
        with tfk.patch(model, backend="cpu"):
            got = model(x)
            again = model(x)
            plain = model.eval()(x)
    assert not torch.equal(got, again)
    for y in (stock, got):
        assert abs(float((y == 0).double().mean()) - 0.5) < 0.02  # of the result's
    spread = [float((y[y != 0] / 2 - plain[y != 0]).std()) for y in (stock, got)]  # of the weights'
    assert spread[0] > 0.05 and abs(spread[0] - spread[1]) < 0.05 * spread[0]


def test_causal_beside_a_mask():
    class Both(ImageAttention):
        def forward(self, x, attn_mask=None):
            causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
            if attn_mask is None:
                attn_mask = causal
            elif attn_mask.dtype == torch.bool:
                attn_mask = attn_mask & causal
            else:
                attn_mask = attn_mask.masked_fill(~causal, float("-inf"))
            return super().forward(x, attn_mask)

    torch.manual_seed(0)
    model = declared(Both, {**IMAGE, "causal": True})
    x = rows(3, 7, WIDTH)
    for mask in (None, torch.ones(7, 7, dtype=torch.bool).triu(-2), rows(1, 4, 7, 7)):
        cast = lambda m, mask=mask: mask.to(m.qkv.weight) if mask is not None and mask.is_floating_point() else mask
        assert_same_results(model, lambda m, cast=cast: m(x.to(m.qkv.weight), attn_mask=cast(m)), backend="cpu")


def test_a_call_beyond_the_declaration_runs_as_it_is_written():
    torch.manual_seed(0)
    model = nn.ModuleList([declared(ImageAttention, IMAGE)])
    x = torch.randn(3, 7, WIDTH)
    wanted = model[0](x, is_causal=True)
    with tfk.patch(model) as report:
        model[0](x, None, False)
        model[0](attn_mask=None, is_causal=False, x=x)
        assert not report.fallbacks
        assert torch.equal(model[0](x, is_causal=True), wanted)
        assert report.fallbacks == {"0": {"its recipe does not serve this call": 1}}
        for args, kwargs in (((x, None, False, 3), {}), ((x,), {"x": x}), ((), {}), ((x,), {"scale": 2.0})):
            with pytest.raises(TypeError, match=r"forward\(\)"):
                model[0](*args, **kwargs)


def test_compiles_and_keeps_its_state():
    torch.manual_seed(0)
    model, x = CausalSelfAttention(), torch.randn(3, 7, WIDTH)
    tfk.patching.declare_attention(CausalSelfAttention, **NANO)
    wanted = model(x)
    with tfk.patch(model):
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), wanted)


def test_gradients_in_bfloat16_are_as_exact_as_before():
    torch.manual_seed(0)
    model = declared(CausalSelfAttention, NANO).bfloat16()
    exact = results(declared(CausalSelfAttention, NANO).double(), lambda m: m(rows(3, 7, WIDTH).to(m.c_attn.weight)))
    assert all(torch.isfinite(t).all() for t in exact.values())
    run = lambda m: m(rows(3, 7, WIDTH).to(m.c_attn.weight))
    stock = results(model, run)
    with tfk.patch(model, backend="cpu"):
        compare(results(model, run), stock, 0.05)


class Remembering(MultiHeadedAttention):
    """A forward that keeps what it last saw: in an attribute, in a new one, in a new buffer, and in place."""

    def __init__(self):
        super().__init__(4, WIDTH)
        self.calls = torch.zeros(())
        self.register_buffer("last", None)

    def forward(self, query, key, value, mask=None):
        self.calls += 1
        self.last, self.new = query, key
        return super().forward(query, key, value, mask)


def test_a_trial_leaves_no_trace():
    model = Remembering()
    tfk.patching.declare_attention(Remembering, **ANNOTATED, mask_axis="batch")
    state, before = torch.get_rng_state(), model.train().calls
    assert {entry.name for entry in tfk.patch(nn.Sequential(model)).replaced} >= {"0"}
    assert model.attn is None and model.last is None and not hasattr(model, "new") and model.calls is before
    assert model.calls == 0 and model.training and torch.equal(state, torch.get_rng_state())


def wrong(declaration, **changes):
    return {**declaration, **changes}


BATCH = wrong(ANNOTATED, mask_axis="batch")
SEPARATE = dict(query="w_q", key="w_k", value="w_v", out="w_o", heads="heads")
GIVES = r"must give \S+\(the heads of softmax\(scale q k\^T\) v( of a causal mask)?\), got "
OTHER = GIVES + "other numbers"
ALONE, MASKED = OTHER + " without a mask: ", OTHER + " with a mask: those of "
DROPS = "in training must drop "
dropping = lambda cls: lambda: cls(0.5)
annotated = lambda: MultiHeadedAttention(HEADS, WIDTH)
separate = lambda: MultiHeadAttention(WIDTH, HEADS)
shown = lambda: AttentionWithWeights(WIDTH, HEADS)
BOTH = (NANO["dropout"], NANO["out_dropout"])
REFUSED = {  # what is wrong -> class, declaration, what patch says
    "causal not said": (CausalSelfAttention, wrong(NANO, causal=False), ALONE + "those of causal=True"),
    "not causal": (ImageAttention, wrong(IMAGE, causal=True), ALONE + "those of causal=False"),
    "heads": (CausalSelfAttention, wrong(NANO, heads=2), ALONE + "heads, kv_heads, causal, scale and the order of"),
    "no such heads": (CausalSelfAttention, wrong(NANO, heads=5), GIVES + r"shapes that give none \(.*\) without a"),
    "scale": (ImageAttention, wrong(IMAGE, scale=0.3), ALONE),
    "key and value": (separate, wrong(SEPARATE, key="w_v", value="w_k"), ALONE),
    "order of arguments": (lambda: Cross(16, 16), wrong(CROSS, arguments=None), ALONE),
    "kv_heads": (GroupedAttention, wrong(GROUPED, kv_heads=None), "kv_heads must .* wq gives 16 features and wk 8, "),
    "mask": (annotated, wrong(ANNOTATED, mask_axis="batch", mask="hide"), MASKED + "mask='keep'"),
    "mask's axis": (annotated, ANNOTATED, MASKED + "mask_axis='batch'"),
    "padding": (GroupedAttention, wrong(GROUPED, mask_axis=None), "with a mask: those of mask_axis='keys'"),
    "no weights": (separate, wrong(SEPARATE, weights=True), r"must give a tuple \(result, weights\) where weights=T"),
    "weights": (shown, SEPARATE, "must give the result alone where weights=False, got a tuple of 2"),
    "its norm": (PreNormAttention, wrong(PRE_NORM, norm=None), ALONE),
    "beside a Sequential": (dropping(PreNormAttention), wrong(PRE_NORM, dropout=None), DROPS + "elements by no "),
    "norms": (lambda: ImageAttention(norm=nn.LayerNorm), IMAGE, ALONE),
    "no dropout": (dropping(ImageAttention), wrong(IMAGE, dropout=None, out_dropout=None), DROPS + "elements by no "),
    "of weights": (dropping(CausalSelfAttention), wrong(NANO, dropout=None), DROPS + "elements by 'resid_drop"),
    "of the result": (dropping(CausalSelfAttention), wrong(NANO, out_dropout=None), DROPS + "elements by 'attn_drop"),
    "number": (dropping(FlashAttention), NANO, DROPS + "elements by 'attn_dropout' and 'resid_dropout' alone, as decl"),
    "exchanged": (CausalSelfAttention, wrong(NANO, dropout=BOTH[1], out_dropout=BOTH[0]), DROPS + f"by '{BOTH[1]}'"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_declaration_is_refused_by_patch(case, dtype):
    torch.manual_seed(0)
    cls, declaration, says = REFUSED[case]
    module = cls().to(dtype)
    tfk.patching.declare_attention(type(module), **declaration)
    model, before = nn.Sequential(module), dict(module.__dict__)
    with pytest.raises(ValueError, match=rf"^declare_attention: ({type(module).__name__}.forward )?.*{says}"):
        tfk.patch(model)
    assert tfk.unpatch(model) == 0 and module.__dict__ == before


def test_a_mask_of_numbers_is_tried_where_bool_is_refused():
    class Subtracting(MultiHeadAttention):
        def forward(self, x, mask=None):
            mask = None if mask is None else ((1 - mask) * -1e9 == 0)[:, None, None, :]
            return super().forward(x, x, x, mask)

    torch.manual_seed(0)
    model = nn.ModuleList([Subtracting(WIDTH, HEADS)])
    for meaning, says in (("hide", "those of mask='keep'"), ("keep", None)):
        tfk.patching.declare_attention(Subtracting, **SEPARATE, mask=meaning, mask_axis="keys")
        if says:
            with pytest.raises(ValueError, match=f"with a mask: {says}"):
                tfk.patch(model)
    x, mask = rows(3, 7, WIDTH), (torch.arange(7) < torch.tensor([4, 7, 2])[:, None]).long()
    assert_same_results(model, lambda m: m[0](x.to(m[0].w_q.weight), mask))


def test_what_cannot_be_tried_is_believed():
    tfk.patching.declare_attention(CausalSelfAttention, **wrong(NANO, heads=2))
    own, other = CausalSelfAttention(), CausalSelfAttention()
    own.c_proj.forward = own.c_proj.forward
    other.c_attn = nn.Sequential(other.c_attn)
    for module in (own, other, CausalSelfAttention().to("meta")):
        assert "0" in {entry.name for entry in tfk.patch(nn.Sequential(module)).replaced}


class Perceptron(nn.Module):
    """In the style of nanoGPT: the dropout is behind the second layer."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.c_fc, self.gelu, self.c_proj = nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


def test_a_feed_forward_block_that_drops_its_result():
    torch.manual_seed(0)
    names = dict(first="c_fc", second="c_proj", activation="gelu")
    tfk.patching.declare_feed_forward(Perceptron, **names, out_dropout="dropout")
    model = nn.ModuleList([Perceptron()])
    assert_same_results(model, lambda m: m[0](rows(3, 7, WIDTH).to(m[0].c_fc.weight)), backend="cpu")
    model[0].dropout.p = 0.5
    x, stock = torch.randn(512, WIDTH), model.eval()[0](torch.zeros(1, WIDTH))
    assert stock.isfinite().all()
    with tfk.patch(model, backend="cpu"), torch.no_grad():
        plain, dropped = model[0](x), model.train()[0](x)
    seen = dropped != 0
    assert abs(float(seen.double().mean()) - 0.5) < 0.03
    torch.testing.assert_close(dropped[seen], 2 * plain[seen])
    for places, says in (
        ({"dropout": "dropout"}, "Perceptron.forward in training must drop by 'dropout' what is declared, got others"),
        ({}, "Perceptron.forward in training must drop elements by no dropout alone, as declared, got some dropped"),
        ({"out_dropout": "drop"}, "out_dropout must name an attribute of Perceptron, got 'drop'; it has c_fc, gelu, "),
    ):
        tfk.patching.declare_feed_forward(Perceptron, **names, **places)
        with pytest.raises(ValueError, match=f"^declare_feed_forward: {says}"):
            tfk.patch(model)
    tfk.patching.declare_feed_forward(Perceptron, **names, out_dropout="dropout")
    model[0].dropout = nn.Identity()
    with tfk.patch(model, backend="cpu"), torch.no_grad():
        torch.testing.assert_close(model[0](x), plain)


class PreNormPerceptron(nn.Module):
    """In the style of vit-pytorch: all in one Sequential, the norm first."""

    def __init__(self, dropout=0.0):
        super().__init__()
        hidden = [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(dropout)]
        self.net = nn.Sequential(*hidden, nn.Linear(32, WIDTH), nn.Dropout(dropout))

    def forward(self, x):
        return self.net(x)


def test_a_feed_forward_block_with_its_norm_inside():
    torch.manual_seed(0)
    names = dict(first="net.1", second="net.4", activation="gelu", dropout="net.3", out_dropout="net.5")
    tfk.patching.declare_feed_forward(PreNormPerceptron, **names, norm="net.0")
    model = nn.ModuleList([PreNormPerceptron()])
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    assert_same_results(model, lambda m: m[0](rows(3, 7, WIDTH).to(m[0].net[1].weight)), backend="cpu")
    with tfk.patch(nn.ModuleList([PreNormPerceptron(0.1)])) as report:
        assert {"0", "0.net.1"} <= {entry.name for entry in report.replaced}
    tfk.patching.declare_feed_forward(PreNormPerceptron, **names)
    with pytest.raises(ValueError, match="^declare_feed_forward: PreNormPerceptron.forward must give net.4"):
        tfk.patch(model)
    with pytest.raises(ValueError, match="^declare_feed_forward: norm must be None where channels_first=True, got 'n"):
        tfk.patching.declare_feed_forward(PreNormPerceptron, **names, norm="net.0", channels_first=True)
    with pytest.raises(ValueError, match="^declare_attention: norm must be None where queries, keys and values are"):
        tfk.patching.declare_attention(Cross, **CROSS, norm="norm")


def test_a_switch_is_no_mask():
    class Switched(CausalSelfAttention):
        def forward(self, x, use_cache=False):
            return super().forward(x) * (2 if use_cache else 1)

    torch.manual_seed(0)
    tfk.patching.declare_attention(Switched, **NANO)
    model, x = nn.ModuleList([Switched()]), torch.randn(2, 5, WIDTH)
    wanted = model[0](x, use_cache=True)
    with tfk.patch(model) as report:
        model[0](x)
        assert not report.fallbacks
        assert torch.equal(model[0](x, True), wanted) and "0" in report.fallbacks


def test_numbers_that_a_config_holds():
    class Configured(nn.Module):
        def __init__(self, dropout=0.0):
            super().__init__()
            self.config = SimpleNamespace(heads=HEADS, dropout=dropout)
            self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            q, k, v = (t.unflatten(-1, (self.config.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
            p = self.config.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=p)
            return self.proj(y.transpose(1, 2).flatten(2))

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.config = nn.Parameter(torch.ones(WIDTH)), SimpleNamespace(eps=0.5)

        def forward(self, x):
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.eps) * self.weight

    torch.manual_seed(0)
    declaration = dict(qkv="qkv", out="proj", heads="config.heads", dropout="config.dropout")
    tfk.patching.declare_attention(Configured, **declaration)
    tfk.patching.declare_rms_norm(Scaled, eps="config.eps")
    model = nn.Sequential(Configured(), Scaled())
    assert_same_results(model, lambda m: m(rows(3, 7, WIDTH).to(m[1].weight)), backend="cpu")
    with tfk.patch(nn.Sequential(Configured(0.5), Scaled())) as report:
        assert {"0", "1"} <= {entry.name for entry in report.replaced}
    tfk.patching.declare_attention(Configured, **wrong(declaration, heads="config.n_head"))
    with pytest.raises(ValueError, match="heads must name an attribute of Configured, got 'config.n_head'; config "):
        tfk.patch(model)
