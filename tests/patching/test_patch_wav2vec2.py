"""patch() on Wav2Vec2 and what shares its code: HuBERT, UniSpeech, SEW, Data2Vec's audio, WavLM; blocks of others."""

import copy
import importlib
import pickle

import pytest
import torch

import tfm_kernels as tfk
from tests.patching.models import assert_dropout_proven, assert_same_results, results, transformers
from tfm_kernels.mask import Mask
from tfm_kernels.patching import huggingface

AUDIO = dict(
    vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, conv_dim=(16, 16),
    conv_kernel=(10, 3), conv_stride=(5, 2), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2, conv_pos_kernel_size=3, layerdrop=0.0, mask_time_prob=0.0,
)  # fmt: skip
DROPOUTS = ("hidden_dropout", "activation_dropout", "attention_dropout")
STABLE = ("Wav2Vec2", "Hubert", "UniSpeech", "UniSpeechSat", "WavLM")
KINDS = [*((name, True) for name in STABLE), *((name, False) for name in (*STABLE, "Data2VecAudio", "SEW"))]
LENGTH = 330


def audio(name="Wav2Vec2", stable=False, **changes):
    hf = transformers()
    settings = {**AUDIO, "feat_proj_dropout": 0.0, "final_dropout": 0.0, "do_stable_layer_norm": stable, **changes}
    torch.manual_seed(0)
    return getattr(hf, f"{name}Model")(getattr(hf, f"{name}Config")(**settings)).eval()


def inputs(padded=True):
    torch.manual_seed(1)
    lengths = torch.tensor([[LENGTH], [LENGTH // 2 if padded else LENGTH]])
    return {"input_values": torch.randn(2, LENGTH), "attention_mask": (torch.arange(LENGTH) < lengths).long()}


def run_on(padded=True, **more):
    given = inputs(padded)

    def run(model):
        wave = given["input_values"].to(next(model.parameters()))
        return model(wave, attention_mask=given["attention_mask"], **more).last_hidden_state

    return run


def flat(given):
    """WavLM's layers give their position bias, too."""
    return given if isinstance(given, tuple) else (given,)


def layer_of(model):
    return model.encoder.layers[0]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name, stable", KINDS)
def test_same_numbers(name, stable, padded):
    model = audio(name, stable)
    with tfk.patch(model) as report:
        told = {entry.name: entry.note for entry in report.replaced}
        assert told["encoder.layers.0.feed_forward"] == told["encoder.layers.1.feed_forward"] == "feed-forward"
        norm = "encoder.layers.0.final_layer_norm"
        what = "sum and LayerNorm in one pass" if stable else "sums with LayerNorm"
        assert told["encoder.layers.0"] == what and told[norm] == "runs inside encoder.layers.0"
    assert_same_results(model, run_on(padded))


BLOCKS = {  # config -> the block's class, and what it takes beside the config
    "Wav2Vec2Conformer": ("wav2vec2_conformer.modeling_wav2vec2_conformer.Wav2Vec2ConformerFeedForward", ()),
    "Wav2Vec2Bert": ("wav2vec2_bert.modeling_wav2vec2_bert.Wav2Vec2BertFeedForward", ()),
    "SeamlessM4T": ("seamless_m4t.modeling_seamless_m4t.SeamlessM4TConformerFeedForward", ()),
    "SpeechT5": ("speecht5.modeling_speecht5.SpeechT5FeedForward", (64,)),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_feed_forward_of_others(name):
    config = getattr(transformers(), f"{name}Config")(**AUDIO, speech_encoder_intermediate_size=64)
    path, more = BLOCKS[name]
    file, _, cls = path.rpartition(".")
    torch.manual_seed(0)
    block = getattr(importlib.import_module(f"transformers.models.{file}"), cls)(config, *more).eval()
    x = torch.randn(3, 5, 32, dtype=torch.float64)
    with tfk.patch(block) as report:
        assert report.entries[0].replaced and report.entries[0].note == "feed-forward"
    assert_same_results(block, lambda m: m(x.to(next(m.parameters()))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name, stable", [("Wav2Vec2", False), ("Wav2Vec2", True), ("WavLM", False)])
def test_proven(name, stable, training, padded, dtype):
    dropouts = dict.fromkeys(DROPOUTS, 0.1)
    report = tfk.prove(audio(name, stable, **dropouts).train(training), inputs(padded), dtype=dtype, steps=1)
    assert report.passed, report.table()
    assert not any("original code" in note for note in report.notes), report.notes


@pytest.mark.parametrize("dropout", DROPOUTS)
@pytest.mark.parametrize("name, stable", [("Wav2Vec2", False), ("Hubert", True), ("WavLM", False), ("WavLM", True)])
def test_each_dropout_is_dropped_where_it_was(name, stable, dropout):
    model = audio(name, stable, **{**dict.fromkeys(DROPOUTS, 0.0), dropout: 0.3})
    model.encoder.dropout.p = 0.0
    assert_dropout_proven(model, inputs(), lambda out: out.last_hidden_state)


@pytest.mark.parametrize("name", ["Wav2Vec2", "Hubert", "UniSpeech", "UniSpeechSat", "Data2VecAudio", "SEW"])
def test_padding_reaches_attention_as_data(name, monkeypatch):
    masks, attend, model = [], huggingface.attend, audio(name)

    def spy(query, key, value, mask, **options):
        masks.append(mask)
        return attend(query, key, value, mask, **options)

    monkeypatch.setattr(huggingface, "attend", spy)
    with tfk.patch(model), torch.no_grad():
        run_on()(model)
    assert len(masks) == 2 and all(isinstance(mask, Mask) and mask.keep_matrix is not None for mask in masks)


def test_an_adapter_behind_the_layer():
    model = audio(stable=True, adapter_attn_dim=8)
    assert layer_of(model).adapter_layer is not None
    torch.nn.init.normal_(layer_of(model).adapter_layer.linear_2.weight)
    assert_same_results(model, run_on())


@pytest.mark.parametrize("name, stable", [("Wav2Vec2", False), ("WavLM", True)])
def test_hidden_states_and_attentions(name, stable):
    model = audio(name, stable)
    model.set_attn_implementation("eager")
    given = {**inputs(), "output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        stock = model(**given)
        with tfk.patch(model) as report:
            out = model(**given)
            assert report.fallbacks == {}
    for kind in ("hidden_states", "attentions"):
        assert len(out[kind]) == len(stock[kind]) == (3 if kind == "hidden_states" else 2)
        for a, b in zip(out[kind], stock[kind], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("place", ["final_layer_norm", "dropout", "feed_forward.output_dense"])
def test_who_watches_a_part_sees_it_run(place, stable):
    model, seen, run = audio(stable=stable), [], run_on()
    stock = run(model)
    with tfk.patch(model) as report:
        inner = layer_of(model).get_submodule(place)
        inner.register_forward_hook(lambda *a: seen.append(a[2].shape))
        torch.testing.assert_close(run(model), stock)
        assert len(seen) == 1
        name, _, last = f"encoder.layers.0.{place}".rpartition(".")
        assert report.fallbacks == {name: {f"{last} has hooks": 1}}


def test_changed_code_keeps_its_layer():
    own = transformers().models.wav2vec2.modeling_wav2vec2

    class Layer(own.Wav2Vec2EncoderLayer):
        def forward(self, hidden_states, attention_mask=None, **kwargs):
            return super().forward(hidden_states, attention_mask, **kwargs) * 2

    model, run = audio(), run_on()
    layer_of(model).__class__ = Layer
    stock = run(model)
    with tfk.patch(model) as report:
        assert {entry.name: entry.replaced for entry in report.entries}["encoder.layers.0"] is False
        torch.testing.assert_close(run(model), stock)


@pytest.mark.parametrize("name, stable", [("Hubert", False), ("Hubert", True), ("WavLM", False)])
def test_copies_and_the_way_back(name, stable):
    """Of a model a copy; of a layer a pickle too, which PyTorch refuses for the convolution with a weight norm."""
    model, run = audio(name, stable), run_on()
    stock, classes, x = run(model), [type(module) for module in model.modules()], torch.randn(2, 5, 32)
    with tfk.patch(model):
        copied = copy.deepcopy(model)
        assert torch.equal(run(copied), run(model)) and type(layer_of(copied)) is type(layer_of(model))
        loaded = pickle.loads(pickle.dumps(layer_of(model)))
        assert type(loaded) is type(layer_of(model))
        for given, wanted in zip(flat(loaded(x)), flat(layer_of(model)(x)), strict=True):
            assert torch.equal(given, wanted)
    assert [type(module) for module in model.modules()] == classes and torch.equal(run(model), stock)
    tfk.unpatch(copied)
    assert [type(module) for module in copied.modules()] == classes and torch.equal(run(copied), stock)


def test_gradient_checkpointing():
    model, run = audio(**dict.fromkeys(DROPOUTS, 0.1)).double().train(), run_on()

    def seeded(m):
        torch.manual_seed(3)
        return run(m)

    with tfk.patch(model, backend="reference") as report:
        plain = results(model, seeded)
        model.gradient_checkpointing_enable()
        torch.testing.assert_close(results(model, seeded), plain)
        assert report.fallbacks == {}


@pytest.mark.parametrize("name, stable", [("Wav2Vec2", False), ("Wav2Vec2", True), ("WavLM", False)])
def test_compiled(name, stable):
    encoder, x = audio(name, stable).encoder, torch.randn(2, 9, 32)
    stock = encoder(x).last_hidden_state
    with tfk.patch(encoder) as report:
        given = torch.compile(encoder, fullgraph=True, backend="aot_eager")(x).last_hidden_state
        assert report.fallbacks == {}
        torch.testing.assert_close(given, stock)
        given.sum().backward()
    torch._dynamo.reset()
