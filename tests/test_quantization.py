"""quantize(): what it replaces and what it leaves, that the numbers are those of the rounded weights, and patch()."""

import copy
import math

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from tfm_kernels.nn.int8 import quantized_weight
from tfm_kernels.patching import block
from tfm_kernels.proof.rule import Judge
from tfm_kernels.testing.float64 import assert_same_in_float64

SCHEMES = ["int8_weight_only", "int8_dynamic"]
IDS = torch.randint(4, 50, (3, 11), generator=torch.Generator().manual_seed(0))
SIZES = {"d_model": 32, "nhead": 4, "dim_feedforward": 64, "dropout": 0.0}


def models():
    m = tfk.models
    two = {"num_encoder_layers": 2, "num_decoder_layers": 2}
    return {
        "causal": (m.CausalLanguageModel(m.CausalLanguageConfig(50, 2, **SIZES)), (IDS,), 7),
        "shared": (m.MaskedLanguageModel(m.MaskedLanguageConfig(50, 2, share_embeddings=True, **SIZES)), (IDS,), 7),
        "pre-norm": (m.CausalLanguageModel(m.CausalLanguageConfig(50, 2, norm_first=True, **SIZES)), (IDS,), 7),
        "classifier": (m.TransformerClassifier(m.ClassifierConfig(50, 3, 2, **SIZES)), (IDS,), 7),
        "translation": (m.TranslationTransformer(m.TranslationConfig(50, 50, **two, **SIZES)), (IDS, IDS), 15),
    }


def rounded(model):
    """The model with every weight that quantize() takes as float64 of its integers and steps."""
    model = copy.deepcopy(model).double()
    for module in model.modules():
        names = ["weight"] if isinstance(module, nn.Linear) else []
        for name in ["in_proj_weight"] if isinstance(module, nn.MultiheadAttention) else names:
            integers, scale = quantized_weight(getattr(module, name).float())
            setattr(module, name, nn.Parameter(integers.double() * scale.double()[:, None]))
    return model


COARSE = 0.05  # of the norm: what rounding weights and inputs to 8 bits may cost a small model, and no other mistake


def distance(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", models())
@torch.no_grad()
def test_a_model_is_that_of_the_rounded_weights(name, scheme):
    torch.manual_seed(0)
    model, inputs, count = models()[name]
    model.eval()
    expected, plain = rounded(model)(*inputs), model(*inputs)
    report = tfk.quantize(model, scheme)
    found = model(*inputs)
    assert len(report.quantized) == count and not report.kept and report.bytes_after < report.bytes_before
    with tfk.use_backend("aten"):
        own = model(*inputs)
    (row,) = Judge(torch.float32, 1.05).compare("output", *({"scores": y} for y in (expected, own, found)), module="")
    assert row.passed, row
    assert 0 < distance(expected, plain) < COARSE  # it is the same model, and not untouched
    assert not any(p.requires_grad for p in model.parameters())
    moved = copy.deepcopy(model).to(torch.float32)  # a shared weight is not put back
    assert torch.equal(moved(*inputs), found)


@pytest.mark.parametrize("scheme", SCHEMES)
@torch.no_grad()
def test_feed_forward_blocks_go_by_one_op(scheme, monkeypatch):
    """Of any rows where dynamic, else of few."""
    calls, original = [], tfk.ops.int8_ffn
    monkeypatch.setattr(tfk.ops, "int8_ffn", lambda *args, **kwargs: calls.append(args) or original(*args, **kwargs))
    gated = nn.Sequential(tfk.nn.FeedForward(8, 16, 0.0, "silu", gated=True))
    for model, x in ((models()["causal"][0], (IDS[:, :8],)), (gated, (torch.randn(3, 8),))):
        plain = model.eval()(*x)
        tfk.quantize(model, scheme)
        assert distance(model(*x), plain) < COARSE
    assert len(calls) == 3
    for rows, one_op in ((32, True), (33, scheme == "int8_dynamic")):
        calls.clear()
        gated(torch.randn(rows, 8))
        assert bool(calls) is one_op, rows
    calls.clear()
    with tfk.use_backend("aten"):
        gated(*x)
    assert bool(calls) is (scheme == "int8_dynamic")
    gated[0].linear1.register_forward_hook(lambda *_: calls.clear())  # a watched layer is called
    gated(*x)
    assert not calls


@torch.no_grad()
def test_a_forced_backend_without_such_kernels_changes_nothing():
    model = nn.Sequential(tfk.nn.FeedForward(8, 16, 0.0), nn.Linear(8, 4)).eval()
    tfk.quantize(model, "int8_dynamic")
    x = torch.randn(3, 8, dtype=torch.float64)
    expected = model.double()(x)
    with tfk.use_backend("cuda"):
        assert_same_in_float64(model(x), expected)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_decoding_with_the_cache_is_decoding_without(scheme):
    torch.manual_seed(0)
    model, inputs, _ = models()["translation"]
    tfk.quantize(model.eval(), scheme)
    options = {"bos_id": 1, "eos_id": 2}
    cached, plain = (tfk.generate(model, IDS, 9, use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached, plain)


def stock():
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.filterwarnings("ignore:.*nested tensors")
@torch.no_grad()
def test_torch_layers_leave_their_fast_path(scheme, padded):
    torch.manual_seed(0)
    model, x = stock().eval(), torch.randn(3, 7, 32)
    padding = torch.arange(7) >= torch.tensor([7, 4, 6])[:, None] if padded else None
    live = slice(None) if padding is None else ~padding
    plain = model(x, src_key_padding_mask=padding)[live]
    report = tfk.quantize(model, scheme)
    assert [entry.name for entry in report.quantized] == [
        f"layers.{i}.{name}" for i in range(2) for name in ("self_attn", "linear1", "linear2")
    ]
    found = model(x, src_key_padding_mask=padding)[live]
    assert 0 < distance(found, plain) < COARSE
    with tfk.patch(model) as patched:
        model(x, src_key_padding_mask=padding)
        assert not patched.fallbacks
    assert tfk.prove(model, {"src": x, "src_key_padding_mask": padding}).passed


HUGGING_FACE = ("bert", "gpt2", "t5", "llama")


def hugging_face(name):
    """A small model, its inputs, and how many linear layers it has."""
    t = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    few = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 50}
    mask = (torch.arange(11) < torch.tensor([11, 6, 9])[:, None]).long()
    padded = {"input_ids": IDS, "attention_mask": mask}
    both = {**padded, "decoder_input_ids": IDS}
    return {
        "bert": lambda: (t.BertModel(t.BertConfig(vocab_size=50, **sizes)), padded, 13),
        "gpt2": lambda: (t.GPT2Model(t.GPT2Config(**few)), {"input_ids": IDS}, 8),
        "t5": lambda: (t.T5Model(t.T5Config(**t5)), both, 32),
        "llama": lambda: (t.LlamaModel(t.LlamaConfig(vocab_size=50, **sizes)), {"input_ids": IDS}, 14),
    }[name]()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", HUGGING_FACE)
@torch.no_grad()
def test_hugging_face_models_quantized_then_patched(name, scheme):
    """The fused blocks take the int8 layers: nothing falls back, and prove() finds nothing but rounding."""
    torch.manual_seed(0)
    model, inputs, count = hugging_face(name)
    live = inputs["attention_mask"].bool() if name == "bert" else slice(None)
    output = lambda: model.eval()(**inputs).last_hidden_state[live]
    plain = output()
    report = tfk.quantize(model, scheme)
    assert len(report.quantized) == count and not report.kept
    found = output()
    assert 0 < distance(found, plain) < COARSE
    with tfk.patch(model) as patched:
        output()
        blocks = [e.name for e in patched.replaced if e.name.endswith(("mlp", "DenseReluDense", "layer.0", "encoder"))]
        assert blocks and not patched.fallbacks
    assert tfk.prove(model, inputs).passed
    assert torch.equal(output(), found)


class Adapter(nn.Linear):
    """As LoRA's: more than a linear layer."""


def test_an_output_that_is_tied_again_stays_in_8_bits():
    """As transformers does where the vocabulary is resized."""
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, tie_word_embeddings=True)).eval()
    tfk.quantize(model)
    ids = torch.randint(0, 60, (2, 7))
    with torch.no_grad():
        wanted = model(ids).logits
        model.tie_weights()
        assert model.lm_head.weight.dtype == torch.int8 and torch.equal(model(ids).logits, wanted)


def test_what_is_kept_says_why():
    model = nn.ModuleDict(
        {
            "plain": nn.Linear(8, 8),
            "adapter": Adapter(8, 8),
            "hooked": nn.Linear(8, 8),
            "skipped": nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
            "wide": nn.MultiheadAttention(8, 2, kdim=4),
            "attention": nn.MultiheadAttention(8, 2),
            "norm": nn.LayerNorm(8),
        }
    )
    model["hooked"].register_forward_hook(lambda *_: None)
    report = tfk.quantize(model, skip=["skipped"])
    assert {e.name: e.note for e in report.entries} == {
        "plain": "",
        "adapter": "its class, Adapter, may do more than Linear",
        "hooked": "it has hooks",
        "skipped.0": "it was to be skipped",
        "wide": "it has a kdim or vdim of its own",
        "attention": "",
    }
    assert type(model["plain"]) is tfk.nn.Int8Linear and type(model["hooked"]) is nn.Linear
    assert str(report).splitlines()[0].startswith("int8_weight_only: 2 of 6 modules in 8 bits; ")
    assert "adapter  Adapter  kept because its class" in str(report)


def test_names_that_begin_alike_are_not_below():
    report = tfk.quantize(nn.Sequential(*(nn.Linear(4, 4) for _ in range(11))), skip=["1"])
    assert len(report.quantized) == 10


def test_what_the_new_layers_take_over():
    """The mode of each, and the backend."""
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8)).eval()
    tfk.quantize(model, backend="reference")
    assert not any(module.training for module in model.modules())
    assert [layer.backend for layer in (model[0].in_proj, model[0].out_proj, model[1])] == ["reference"] * 3


@torch.no_grad()
def test_patched_blocks_of_8_bits_drop_their_hidden_features():
    first, second = (tfk.nn.Int8Linear.from_weight(torch.randn(4, 4), torch.randn(4)) for _ in range(2))
    y = block.feed_forward(torch.randn(3, 4), first, second, "gelu", dropout_p=1.0)
    assert torch.equal(y, second.bias.expand(3, 4))


def test_weights_that_are_no_floats_are_kept():
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.complex64))
    (entry,) = tfk.quantize(nn.Sequential(layer)).entries
    assert entry.note == "its weights are not floating"


def test_a_layer_in_two_places_stays_one():
    shared = nn.Linear(8, 8)
    model = nn.ModuleList([shared, nn.ReLU(), shared])
    report = tfk.quantize(model)
    assert model[0] is model[2] and type(model[0]) is tfk.nn.Int8Linear and len(report.quantized) == 2
    assert report.bytes_before == 4 * 72 and report.bytes_after == 64 + 2 * 32


def test_a_bad_weight_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data[2, 1] = math.inf
    with pytest.raises(ValueError, match="quantize: 1: weight must be finite, got one with NaN or infinities"):
        tfk.quantize(model)
    assert [type(m) for m in model] == [nn.Linear, nn.Linear] and model[0].weight.requires_grad


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda: tfk.quantize("model"), TypeError, "model must be a torch.nn.Module, got str"),
        (lambda: tfk.quantize(nn.Sequential(), "int4"), ValueError, "scheme must be one of int8_weight_only"),
        (lambda: tfk.quantize(nn.Linear(2, 2)), ValueError, "model must hold its linear layers, got a Linear itself"),
        (lambda: tfk.quantize(nn.Sequential(), skip="0"), TypeError, "skip must be a list of names, got '0'"),
        (lambda: tfk.quantize(nn.Sequential(), skip=[0]), TypeError, "skip must be a list of names, got int in it"),
        (lambda: tfk.quantize(nn.Sequential(), skip=["x"]), ValueError, "skip must name modules of the model, got 'x'"),
        (lambda: tfk.quantize(nn.Sequential(), backend="cuda"), ValueError, "backend must be one of reference, aten"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_sentence(call, error, sentence):
    with pytest.raises(error, match=f"quantize: {sentence}"):
        call()


def test_a_patched_model_is_refused():
    model = stock().eval()
    tfk.patch(model)
    with pytest.raises(ValueError, match="model must not be patched; call tfk.unpatch"):
        tfk.quantize(model)
    tfk.unpatch(model)
    assert tfk.quantize(model).quantized


def test_a_quantized_model_is_quantized_only_once():
    model = stock()
    assert len(tfk.quantize(model).quantized) == 6
    again = tfk.quantize(model)
    assert not again.quantized and {e.note for e in again.entries} == {"it is in 8 bits already"}
