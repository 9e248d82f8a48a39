"""patch(freeze=True): packed weights are kept between calls, never a stale one, and never more than that."""

import copy
import gc
import pickle
import platform

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfm_kernels as tfk
from tests.patching.models import albert, batch, bert, distilbert, encoder
from tfm_kernels import _library
from tfm_kernels.patching import frozen, onednn

pytestmark = pytest.mark.skipif(not onednn.AVAILABLE, reason="this build of PyTorch has no oneDNN product")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def packed_products_pay(monkeypatch):
    monkeypatch.setattr(_library, "nearest", _library.XEON)
    monkeypatch.setattr(frozen, "_PRODUCTS", 0)


def call(model):
    """The live positions of a padded batch, 50 of 60."""
    ids, mask = batch(3, 20, (20, 12, 18))
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        if hasattr(model, "config"):
            return model(ids, attention_mask=mask).last_hidden_state[mask.bool()]
        x = torch.randn(3, 20, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
        return model(x, src_key_padding_mask=~mask.bool())[mask.bool()]


def headless(build):
    """Its pooler, whose few rows keep nothing, left out."""
    model = build()
    model.pooler = None
    return model


MODELS = {
    "bert": lambda: headless(bert),
    "distilbert": distilbert,
    "albert": lambda: headless(albert),
    "encoder": encoder,
}
# four projections a layer, and ALBERT's into its stack; torch.nn's attention has them in one
HOLDERS = {"bert": 8, "distilbert": 8, "albert": 9, "encoder": 2}


def error(y, exact):
    return float((y.double() - exact).norm() / exact.norm())


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 64, 300])
def test_product(rows, dtype, monkeypatch):
    monkeypatch.setattr(onednn, "EMULATED", {torch.bfloat16, torch.float16})
    torch.manual_seed(0)
    for shape, bias in (((24, 40), True), ((7, 5), False), ((100, 33), True)):
        layer, x = nn.Linear(*shape, bias).to(dtype).eval(), torch.randn(rows, shape[0]).to(dtype)
        frozen.freeze(layer)
        y = frozen.product(x, layer, layer.weight, layer.bias)
        if rows < 16:
            assert y is None and frozen.nbytes(layer) == 0
            continue
        exact = F.linear(x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double())
        assert y.dtype == dtype and frozen.nbytes(layer) >= 4 * layer.weight.numel()
        assert error(y, exact) <= 1.05 * error(layer(x), exact) + torch.finfo(dtype).eps / 4
        assert torch.equal(y, frozen.product(x, layer, layer.weight, layer.bias))
        strided = frozen.product(x.t().contiguous().t(), layer, layer.weight, layer.bias)
        torch.testing.assert_close(strided, y)


def test_small_products_make_no_copy(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(_library, "nearest", _library.XEON)
    for rows, width, pays in ((1000, 64, False), (64, 384, True), (16, 384, False), (15, 1024, False), (16, 768, True)):
        layer, x = nn.Linear(width, width).eval().requires_grad_(False), torch.randn(rows, width)
        frozen.freeze(layer)
        assert (frozen.product(x, layer, layer.weight, layer.bias) is not None) is pays


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_outputs(kind, dtype, packed, monkeypatch):
    monkeypatch.setattr(onednn, "EMULATED", {torch.bfloat16, torch.float16})
    model = MODELS[kind]().to(dtype)
    exact = call(copy.deepcopy(model).double())
    with tfk.patch(model, packed=packed):
        plain = call(model)
    with tfk.patch(model, packed=packed, freeze=True) as report:
        assert list(report.frozen.values()) == [0] * HOLDERS[kind]
        first = call(model)
        assert len(report.frozen) == HOLDERS[kind] and all(report.frozen.values()) and report.fallbacks == {}
        assert torch.equal(call(model), first)
        assert f"{HOLDERS[kind]} of {HOLDERS[kind]} modules keep a packed weight so far" in str(report)
    assert error(first, exact) <= 1.05 * error(plain, exact) + torch.finfo(dtype).eps / 4
    assert report.frozen == {}


def test_each_type_of_16_bits_is_emulated_where_the_machine_lacks_its_products(monkeypatch):
    for bf16_tiles, f16_products in ((True, False), (False, True), (True, True), (False, False)):
        monkeypatch.setattr(_library, "bf16_tiles", bf16_tiles)
        monkeypatch.setattr(_library, "f16_products", f16_products)
        native = {torch.bfloat16: bf16_tiles, torch.float16: f16_products}
        monkeypatch.setattr(platform, "machine", lambda: "x86_64")
        assert onednn._emulated() == {dtype for dtype in native if not native[dtype]}
        monkeypatch.setattr(platform, "machine", lambda: "aarch64")
        assert onednn._emulated() == frozenset()


def test_16_bit_weights_are_not_kept_where_the_machine_multiplies_them(monkeypatch):
    monkeypatch.setattr(onednn, "EMULATED", {torch.float16})
    model = encoder().bfloat16()
    with tfk.patch(model, freeze=True) as report:
        call(model)
        assert not any(report.frozen.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_nothing_is_kept_where_vectors_are_short(kind, dtype, monkeypatch):
    """Bit for bit what the patched model gives that was not frozen; training is refused as everywhere."""
    monkeypatch.setattr(_library, "nearest", _library.ZEN3)
    model = MODELS[kind]().to(dtype)
    with tfk.patch(model):
        plain = call(model)
    with tfk.patch(model, freeze=True) as report:
        assert torch.equal(call(model), plain)
        assert list(report.frozen.values()) == [0] * HOLDERS[kind]
        module = model.get_submodule(next(iter(report.frozen)))
        with pytest.raises(RuntimeError, match="freeze=True"):
            frozen.product(torch.ones(20, 16, dtype=dtype), module, torch.ones(3, 16, requires_grad=True), None)


def load(**options):
    return lambda p, m, name: m.load_state_dict({**m.state_dict(), name: torch.randn_like(p)}, **options)


def other_data(p, module, name):
    p.data = torch.randn_like(p)


def optimizer(p, module, name):
    p.grad = torch.randn_like(p)
    torch.optim.AdamW([p], lr=0.1).step()


def fused_optimizer(p, module, name):
    p.grad = torch.randn_like(p)
    written = p._version
    with torch.inference_mode(False):
        torch.optim.AdamW([p], lr=0.1, fused=True).step()
    assert p._version == written, "PyTorch counts this now: the hook on optimizers may go"


def assign(p, module, name):
    *path, last = name.split(".")
    setattr(module.get_submodule(".".join(path)), last, nn.Parameter(torch.randn_like(p)))


CHANGES = {
    "in place": lambda p, m, name: p.mul_(-2.0),
    "element": lambda p, m, name: p[0, 0].fill_(9.0),
    "load_state_dict": load(),
    "load_state_dict, assign": load(assign=True),
    "another parameter": assign,
    "another .data": other_data,
    "into .data": lambda p, m, name: p.data.add_(1.0),
    "optimizer": optimizer,
    "fused optimizer": fused_optimizer,
    "there and back": lambda p, m, name: (m.bfloat16(), m.float()),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind, weight", [("bert", "encoder.layer.1.attention.self.key.weight"),
                                          ("encoder", "layers.1.self_attn.in_proj_weight")])  # fmt: skip
def test_changes_are_noticed(kind, weight, change, mode):
    model = MODELS[kind]()
    with tfk.patch(model, freeze=True):
        before = call(model)
        for _ in range(3):  # also where the allocator gives the same memory again
            with mode():
                CHANGES[change](model.get_parameter(weight), model, weight)
            given = call(model)
            fresh = copy.deepcopy(model)
            tfk.unpatch(fresh)
            torch.testing.assert_close(given, call(fresh))
            assert not torch.equal(given, before)


def test_memory_of_a_replaced_weight_goes_to_no_other():
    """Or a new weight could stand at the old one's address with as many writes counted, and pass for it."""
    model = encoder()
    with tfk.patch(model, freeze=True):
        call(model)
        attention = model.layers[0].self_attn
        address = attention.in_proj_weight.data_ptr()
        attention.in_proj_weight.data = torch.randn(48, 16)
        assert frozen._copies[attention].source.data_ptr() == address  # held, so nobody else's
        call(model)
        assert frozen._copies[attention].source.data_ptr() == attention.in_proj_weight.data_ptr()


@pytest.mark.parametrize("kind", MODELS)
def test_unpatch_drops_everything(kind):
    model = MODELS[kind]()
    before, kept = call(model), len(frozen._copies)
    tfk.patch(model, freeze=True)
    call(model)
    assert len(frozen._copies) == kept + HOLDERS[kind]
    tfk.unpatch(model)
    assert len(frozen._copies) == kept and torch.equal(call(model), before)
    assert not any(frozen.FROZEN in module.__dict__ for module in model.modules())


def test_copies_end_with_their_model():
    kept, model = len(frozen._copies), encoder()
    tfk.patch(model, freeze=True)
    call(model)
    assert len(frozen._copies) == kept + 2
    del model
    gc.collect()
    assert len(frozen._copies) == kept


def test_options_of_the_last_patch_hold_and_contexts_nest():
    model = encoder()
    with tfk.patch(model, freeze=True) as outer:
        call(model)
        with tfk.patch(model) as inner:
            call(model)
            assert inner.frozen == outer.frozen == {}
        assert list(outer.frozen.values()) == [0, 0]
        call(model)
        assert all(outer.frozen.values())
    assert outer.frozen == {}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_and_pickles_hold_no_packed_weight_and_make_their_own(kind, duplicate):
    model = MODELS[kind]()
    tfk.patch(model, freeze=True)
    size, keys = len(pickle.dumps(model)), list(model.state_dict())
    wanted = call(model)
    assert abs(len(pickle.dumps(model)) - size) < 100 and list(model.state_dict()) == keys
    twin = duplicate(model)
    held = [module for module in twin.modules() if frozen.is_frozen(module)]
    assert len(held) == HOLDERS[kind] and not any(map(frozen.nbytes, held))
    assert torch.equal(call(twin), wanted) and all(map(frozen.nbytes, held))
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert not torch.equal(call(twin), wanted) and torch.equal(call(model), wanted)


def test_refusals():
    model, x = encoder(), torch.randn(3, 7, 16)  # too few rows for a packed weight: the refusal is the same
    with pytest.raises(ValueError, match="^patch: freeze=True needs a model in evaluation mode, got one in training"):
        tfk.patch(model.train(), freeze=True)
    assert not any(tfk.patching.swap.is_fused(module) for module in model.modules())
    tfk.patch(model.eval(), freeze=True)
    sentence = "^patch: a model patched with freeze=True is for inference alone, so call model.eval"
    with pytest.raises(RuntimeError, match=sentence):
        model(x)  # its parameters want gradients
    with torch.no_grad(), pytest.raises(RuntimeError, match=sentence):
        model.train()(x)
    model.eval().requires_grad_(False)
    assert model(x).shape == x.shape
    with pytest.raises(RuntimeError, match=sentence):
        model(x.requires_grad_())
    tfk.unpatch(model)
    model(x).sum().backward()
    assert x.grad is not None


def test_compiled_and_autocast_calls_keep_nothing():
    model = encoder()
    wanted = call(model)
    with tfk.patch(model, freeze=True) as report:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(call(compiled), wanted)
        torch._dynamo.reset()
        with torch.autocast("cpu", torch.bfloat16):
            low = call(model)
        assert not any(report.frozen.values())
    with tfk.patch(model), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(call(model), low)
