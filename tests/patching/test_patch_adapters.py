"""patch() and adapters: low-rank layers around linear ones, copies of whole parts, and merging them into the weights.

Modules of the shape of peft's wrappers stand in for them, so that these tests run wherever torch does; the last one,
with peft itself, skips where it is not installed.
"""

import copy
import pickle

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from tests.patching.models import (
    albert,
    assert_as_exact,
    assert_compiles,
    batch,
    bert,
    compare,
    decoder,
    distilbert,
    results,
    transformers,
)
from tfm_kernels import _library
from tfm_kernels.patching import frozen, onednn, packed, swap
from tfm_kernels.testing.float64 import assert_same_in_float64


class LowRank(nn.Module):
    """As peft's lora.Linear: calls the layer it holds, and writes its product into that one's weight when merged."""

    def __init__(self, base):
        super().__init__()
        out, inner = base.weight.shape if isinstance(base, nn.Linear) else base.weight.T.shape
        self.base_layer, self.merged = base, False
        self.down, self.up = nn.Linear(inner, 2, bias=False), nn.Linear(2, out, bias=False)

    weight = property(lambda self: self.base_layer.weight)
    bias = property(lambda self: self.base_layer.bias)

    def forward(self, x):
        return self.base_layer(x) if self.merged else self.base_layer(x) + self.up(self.down(x))

    def merge(self):
        self.base_layer.weight.data += self.up.weight.data @ self.down.weight.data
        self.merged = True


class Saved(nn.Module):
    """As peft's ModulesToSaveWrapper: a copy that is trained, and what it does not have itself asked of that copy."""

    def __init__(self, module):
        super().__init__()
        self.original_module, self.modules_to_save = module, nn.ModuleDict({"default": copy.deepcopy(module)})

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["modules_to_save"]["default"], name)

    def forward(self, *args, **kwargs):
        return self.modules_to_save["default"](*args, **kwargs)


GPT2 = dict(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
MODELS = {
    "llama": lambda: decoder("llama"),
    "qwen2": lambda: decoder("qwen2"),
    "gemma2": lambda: decoder("gemma2"),
    "phi3": lambda: decoder("phi3"),
    "gpt_neox": lambda: decoder("gpt_neox", use_parallel_residual=False),
    "falcon": lambda: decoder("falcon", new_decoder_architecture=True),
    "gpt2": lambda: decoder("gpt2", **GPT2),  # Conv1D
    "bert": bert,
    "distilbert": distilbert,
    "albert": albert,
}
LINEARS = {  # attention's, the feed-forward's
    "llama": (("q_proj", "v_proj"), ("gate_proj", "down_proj")),
    "qwen2": (("q_proj", "v_proj"), ("up_proj",)),
    "gemma2": (("k_proj", "o_proj"), ("down_proj",)),
    "phi3": (("qkv_proj",), ("gate_up_proj",)),
    "gpt_neox": (("query_key_value",), ("dense_h_to_4h",)),
    "falcon": (("query_key_value",), ("dense_4h_to_h",)),
    "gpt2": (("c_attn",), ("c_fc",)),
    "bert": (("query", "value"), ("dense",)),
    "distilbert": (("q_lin", "v_lin"), ("lin1",)),
    "albert": (("query", "value"), ("ffn",)),
}


def run_of(model_kind):
    ids, mask = batch(length=9, lengths=(9, 9, 9) if model_kind == "gemma2" else (5, 9, 3))
    take = lambda out: out.last_hidden_state if "bert" in model_kind else out.logits
    return lambda m: take(m(input_ids=ids, attention_mask=mask))[mask.bool()]


def wrap(model, wrapper, names):
    """Puts a wrapper around each child of these names; everything else is frozen."""
    torch.manual_seed(3)
    model.requires_grad_(False)
    for owner in list(model.modules()):
        for name, inner in list(owner.named_children()):
            if name in names and not isinstance(owner, wrapper):
                setattr(owner, name, wrapper(inner).to(inner.weight.dtype) if wrapper is LowRank else wrapper(inner))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".down." in name or ".up." in name or "modules_to_save" in name)
    return model


def assert_as_stock(kind, wrapper, names, patch_first):
    run = run_of(kind)

    def build(dtype, patched):
        model = MODELS[kind]().to(dtype)
        if patched and patch_first:
            tfk.patch(model, backend="reference")
        wrap(model, wrapper, names)
        if patched and not patch_first:
            tfk.patch(model, backend="reference")
        return model

    exact = results(build(torch.float64, False), run)
    assert len(exact) > 1 and all(name == "output" or "base_layer" not in name for name in exact)
    compare(results(build(torch.float64, True), run), exact, 1e-9)
    stock, patched = (results(build(torch.float32, which), run) for which in (False, True))
    assert_as_exact(patched, stock, exact)


@pytest.mark.parametrize("patch_first", [False, True])
@pytest.mark.parametrize("where", ["attention", "all"])
@pytest.mark.parametrize("kind", MODELS)
def test_low_rank_layers(kind, where, patch_first):
    attention, others = LINEARS[kind]
    assert_as_stock(kind, LowRank, attention if where == "attention" else attention + others, patch_first)


PARTS = {
    "llama": ("mlp", "self_attn", "post_attention_layernorm", "input_layernorm"),
    "gemma2": ("pre_feedforward_layernorm",),
    "phi3": ("post_attention_layernorm", "mlp"),
    "gpt_neox": ("post_attention_layernorm", "attention", "post_attention_dropout"),
    "gpt2": ("ln_2", "mlp"),
    "bert": ("output", "attention", "self", "intermediate", "LayerNorm", "encoder"),
    "distilbert": ("ffn", "attention", "sa_layer_norm"),
    "albert": ("ffn", "attention", "full_layer_layer_norm"),
}


@pytest.mark.parametrize("patch_first", [False, True])
@pytest.mark.parametrize("kind, part", [(kind, part) for kind, parts in PARTS.items() for part in parts])
def test_a_wrapper_in_the_place_of_a_part(kind, part, patch_first):
    names = (part, "mlp") if part == "post_attention_dropout" else (part,)  # a dropout has nothing to train
    assert_as_stock(kind, Saved, names, patch_first)


def test_copies_pickles_and_the_way_back():
    run = run_of("llama")
    model = wrap(MODELS["llama"](), LowRank, sum(LINEARS["llama"], ()))
    stock, classes = run(model), [type(module) for module in model.modules()]
    with tfk.patch(model):
        wanted = run(model)
        for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(run(each), wanted)
    assert torch.equal(run(model), stock) and [type(module) for module in model.modules()] == classes
    assert not any(swap.OPTIONS in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_compiled(kind):
    assert_compiles(wrap(MODELS[kind](), LowRank, LINEARS[kind][0]), run_of(kind))


@torch.no_grad()
@pytest.mark.skipif(not onednn.AVAILABLE, reason="this build of PyTorch has no oneDNN product")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_frozen_model_sees_a_merged_adapter(kind, dtype, monkeypatch):
    """It is written into the weight by .data, which PyTorch does not count."""
    monkeypatch.setattr(_library, "nearest", _library.XEON)
    monkeypatch.setattr(frozen, "_PRODUCTS", 0)
    monkeypatch.setattr(onednn, "EMULATED", {torch.bfloat16})
    run, model = run_of(kind), MODELS[kind]().to(dtype)
    report = tfk.patch(model, freeze=True)
    before = run(model)
    assert sum(report.frozen.values()), "nothing was packed"
    wrap(model, LowRank, LINEARS[kind][0])
    for module in list(model.modules()):
        for name, inner in list(module.named_children()):
            if isinstance(inner, LowRank):
                written = inner.base_layer.weight._version
                inner.merge()
                assert inner.base_layer.weight._version == written, "PyTorch counts this now: the sample may go"
                setattr(module, name, inner.base_layer)
    given = run(model)
    assert torch.equal(given, run(copy.deepcopy(model)))  # which packs its weights anew
    assert not torch.equal(given, before)


CONFIGS = {
    "lora": lambda peft, names: peft.LoraConfig(target_modules=names, r=2),
    "dora": lambda peft, names: peft.LoraConfig(target_modules=names, r=2, use_dora=True),
    "ia3": lambda peft, names: peft.IA3Config(target_modules=names, feedforward_modules=[]),
}


@pytest.mark.parametrize("patch_first", [False, True])
@pytest.mark.parametrize("method", CONFIGS)
@pytest.mark.parametrize("kind", MODELS)
def test_peft_itself(kind, method, patch_first):
    transformers()
    peft = pytest.importorskip(
        "peft", reason="peft is not installed; the stand-ins above hold the shape of its wrappers"
    )
    names, run = list(sum(LINEARS[kind], ())), run_of(kind)
    config = CONFIGS[method](peft, names)
    config.fan_in_fan_out = kind == "gpt2"

    def build(patched):
        model = MODELS[kind]()
        if patched and patch_first:
            tfk.patch(model)
        model = peft.get_peft_model(model, copy.deepcopy(config))
        if patched and not patch_first:
            tfk.patch(model)
        torch.manual_seed(5)
        for parameter in model.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, parameter.mean().item(), 0.1)
        return model.eval()

    stock, patched = build(False), build(True)
    wanted, given = results(stock, run), results(patched, run)
    compare(given, wanted, 1e-5)
    for model in (stock, patched):
        model.requires_grad_(False)
    with stock.disable_adapter(), patched.disable_adapter():
        torch.testing.assert_close(run(patched), run(stock))
    merged, expected = (copy.deepcopy(model).double().merge_and_unload() for model in (patched, stock))
    assert_same_in_float64(run(merged), run(expected))
    tfk.unpatch(patched)
    assert torch.equal(run(patched), run(stock))


DROPOUTS = ("attention_dropout", "resid_pdrop", "embd_pdrop")
PADDED = (torch.arange(9) < torch.tensor([9, 3, 6])[:, None]).long()


@pytest.mark.parametrize("patch_first", [False, True])
@pytest.mark.parametrize(
    "names, more, packs",
    [
        (["q_proj", "v_proj"], {}, True),
        ("all-linear", {}, True),
        (["down_proj"], {"lora_dropout": 0.1}, False),  # other elements would be dropped
        (["q_proj", "down_proj"], {"use_dora": True}, False),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "phi3"])
def test_decoders_with_adapters_run_packed(kind, names, more, packs, patch_first):
    transformers()
    peft = pytest.importorskip("peft", reason="peft is not installed")
    if kind == "phi3" and isinstance(names, list):
        names = [{"q_proj": "qkv_proj", "v_proj": "o_proj"}.get(name, name) for name in names]
    config = peft.LoraConfig(target_modules=names, r=2, task_type="CAUSAL_LM", init_lora_weights=False, **more)
    ids = torch.randint(3, 99, PADDED.shape, generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(PADDED == 0, -100)

    def trained(model):
        torch.manual_seed(7)
        loss = model(input_ids=ids, attention_mask=PADDED, labels=labels).loss
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        return {"loss": loss.detach(), **gradients}

    def build(patched):
        model = decoder(kind, **{name: 0.0 for name in DROPOUTS})
        if patched and patch_first:
            tfk.patch(model)
        torch.manual_seed(5)
        model = peft.get_peft_model(model, copy.deepcopy(config))
        if patched and not patch_first:
            tfk.patch(model)
        return model.train()

    wanted, model, seen = trained(build(False)), build(True), []
    watch = lambda stack, how: seen.append(stack)
    packed.WATCHERS.append(watch)
    try:
        compare(trained(model), wanted, 1e-5)
    finally:
        packed.WATCHERS.remove(watch)
    assert bool(seen) is packs
