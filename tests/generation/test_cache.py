"""Decoding with a cache gives at every position what the full forward gives."""

import copy

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from tests.models.peers import VT, V, inputs, small
from tests.patching.models import transformers
from tfm_kernels.generation.decoder import CachedDecoder
from tfm_kernels.nn import attention
from tfm_kernels.nn.cache import GrowingCache, Reserved, moves
from tfm_kernels.ops.attention_step import attention_step

NEW = 9
CHANGES = [
    {},
    {"norm_first": True},
    {"positions": "learned", "activation": "gelu"},
    {"final_norm": True, "bias": False},
]


def sharp(kind, **changes):
    """A small model whose scores lie far enough apart that rounding never decides."""
    model = small(kind, **changes)
    with torch.no_grad():
        model.output.weight.mul_(4.0)
        model.output.bias[0] = 40.0  # padding is the most probable token everywhere, and never generated
    return model


def begin(kind):
    return {"bos_id": 1} if kind == "translation" else {}


def spread(kind, where):
    """Rows of 6, 4 and 7 tokens with their padding on the right, on the left, or between them."""
    ids = inputs(kind)[0]
    if where == "left":
        return torch.stack([row.roll(int((row == 0).sum())) for row in ids])
    if where == "between":
        return torch.stack([torch.cat([row[:2], row[row == 0], row[2:][row[2:] != 0]]) for row in ids])
    return ids


@pytest.mark.parametrize("changes", CHANGES, ids=str)
@pytest.mark.parametrize("kind", ["causal", "translation"])
def test_scores_of_every_position_are_those_of_the_full_forward(kind, changes):
    """In float32 no further from float64 than the full forward is, times 2; in float64 to rounding."""
    single = small(kind, backend="cpu", **changes)
    double = copy.deepcopy(single).double()
    source = inputs(kind)[0]
    tokens = torch.randint(1, VT, (3, NEW))
    found = {}
    with torch.no_grad():
        for model in (single, double):
            decoder = CachedDecoder(model, NEW, source if kind == "translation" else None)
            rows = [decoder.start(tokens[:, :2], None)] + [decoder.step(tokens[:, t]) for t in range(2, NEW)]
            full = model(source, tokens) if kind == "translation" else model(tokens)
            found[model] = torch.stack(rows, 1), full[:, 1:]
    cached, full = found[double]
    torch.testing.assert_close(cached, full, rtol=1e-11, atol=1e-11)
    error, allowed = (found[single][0] - full).norm(), (found[single][1] - full).norm()
    assert error <= 2 * allowed + 2**-21 * full.norm()


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("changes", CHANGES, ids=str)
@pytest.mark.parametrize("kind", ["causal", "translation"])
def test_a_step_in_one_call_is_the_ops_it_stands_for(kind, changes, beams, monkeypatch):
    """Bit for bit: every score of every step, by attention_step and by the ops on the same backend."""
    model, source = small(kind, backend=None, **changes), inputs(kind)[0]
    tokens, index = torch.randint(1, VT, (3, NEW)), torch.tensor([1, 0, 0, 3, 5, 4, 6, 7, 6])
    steps, found = [], []

    def counted(*arguments):
        steps.append(attention_step(*arguments))
        return steps[-1]

    for step in (counted, lambda *arguments: None):
        monkeypatch.setattr(attention, "attention_step", step)
        with torch.no_grad(), tfk.use_backend("cpu"):
            decoder = CachedDecoder(model, NEW, source if kind == "translation" else None)
            rows = [decoder.start(tokens[:, :2], None)]
            if beams > 1:
                decoder.expand(beams)
            for t in range(2, NEW):
                rows.append(decoder.step(tokens[:, t].repeat_interleave(beams)))
                if beams > 1:
                    decoder.reorder(index)
            found.append(rows)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    layers = 2
    assert len(steps) == layers * (NEW - 2) * (2 if kind == "translation" else 1)
    assert not any(y is None for y in steps)


@pytest.mark.parametrize("backend", [None, "cpu", "aten", "reference"])
def test_whose_steps_go_in_one_call(backend, monkeypatch):
    asked = []
    monkeypatch.setattr(attention, "attention_step", lambda *arguments: asked.append(arguments))
    tfk.generate(small("causal", backend=backend), torch.tensor([[3, 4, 5]]), 4)
    assert bool(asked) is (backend in (None, "cpu"))


@pytest.mark.parametrize(
    ("backend", "where"),
    [("cpu", "right"), ("cpu", "left"), ("cpu", "between"), (None, "right"), ("aten", "left"), ("reference", "right")],
)
@pytest.mark.parametrize("changes", CHANGES[:3], ids=str)
@pytest.mark.parametrize("kind", ["causal", "translation"])
def test_greedy_tokens_are_those_of_the_full_forward(kind, changes, where, backend):
    """Every row gives what the model gives for it alone, one argmax of the whole forward after the other."""
    model = sharp(kind, backend=backend, **changes)
    ids = spread(kind, where)
    found = tfk.generate(model, ids, NEW, **begin(kind))
    assert torch.equal(found, tfk.generate(model, ids, NEW, use_cache=False, **begin(kind)))
    with torch.no_grad():
        for row, given in zip(found, ids, strict=True):
            given = given[given != 0][None]
            text = torch.ones(1, 1, dtype=torch.long) if kind == "translation" else given
            for _ in range(NEW):
                scores = (model(given, text) if kind == "translation" else model(text))[:, -1].clone()
                scores[:, 0] = -torch.inf
                text = torch.cat([text, scores.argmax(-1, keepdim=True)], 1)
            assert torch.equal(row[: text.shape[1]], text[0]) and not row[text.shape[1] :].any()


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", ["causal", "translation"])
def test_beams_with_a_cache_are_those_without(kind, norm_first):
    model = sharp(kind, norm_first=norm_first)
    for where in ("right", "left"):
        ids = spread(kind, where)
        for stops in (None, [3, 5]):
            told = {"num_beams": 3, "eos_id": stops, "length_penalty": 0.6, **begin(kind)}
            assert torch.equal(
                tfk.generate(model, ids, NEW, **told), tfk.generate(model, ids, NEW, use_cache=False, **told)
            )


@pytest.mark.parametrize("backend", ["cpu", "aten"])
@pytest.mark.parametrize("changes", CHANGES[:2], ids=str)
@pytest.mark.parametrize("kind", ["causal", "translation"])
def test_layers_that_share_their_weights_keep_their_own_keys(kind, changes, backend):
    """One layer called twice, as in ALBERT and the Universal Transformer: its calls are told apart by their order."""
    model = sharp(kind, backend=backend, **changes)
    layers = (model.encoder if kind == "causal" else model.transformer.decoder).layers
    layers[1] = layers[0]
    for where in ("right", "left"):
        ids = spread(kind, where)
        for beams in (1, 3):
            told = {"num_beams": beams, **begin(kind)}
            assert torch.equal(
                tfk.generate(model, ids, NEW, **told), tfk.generate(model, ids, NEW, use_cache=False, **told)
            )


def test_bfloat16_and_autocast_decode():
    model, ids = sharp("translation", backend=None), inputs("translation")[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = tfk.generate(model, ids, 3, bos_id=1)
    assert found.shape == (3, 4)
    assert tfk.generate(model.bfloat16(), ids, 3, bos_id=1).shape == (3, 4)


def test_the_source_is_projected_once():
    model, ids = small("translation"), inputs("translation")[0]
    calls = []
    for layer in model.transformer.decoder.layers:
        attention = layer.multihead_attn
        project = attention._project
        attention._project = lambda *given, project=project: calls.append(given[1].shape) or project(*given)
    tfk.generate(model, ids, 5, bos_id=1, num_beams=2)
    assert calls == [(3, 7, 16)] * len(model.transformer.decoder.layers)


def test_the_cache_is_written_in_place():
    """The memory of the first call is that of the last; what a step reads is a view of it."""
    model = small("causal")
    cache = GrowingCache(8)
    pointers, shapes = set(), []
    for new in (3, 1, 1):
        cache.prepare(new)
        model.encoder(torch.randn(2, new, 16), mask=cache)
        cache.advance()
        for kept in cache._kept.values():
            k, v = kept.first(cache.length)
            pointers |= {k.data_ptr(), v.data_ptr()}
            shapes.append(k.shape)
    assert len(pointers) == 2 * len(model.encoder.layers)
    assert shapes[-1] == (2, 4, 5, 4)
    cache.prepare(3)
    with pytest.raises(ValueError, match="room for 8 positions, got 9"):
        cache.prepare(4)


def test_reserved_memory_grows_reorders_and_expands():
    torch.manual_seed(0)
    k, v = torch.randn(2, 3, 2, 4, 5)
    kept = Reserved(k, v, 6)
    assert torch.equal(torch.stack(kept.write(k, v, 0)), torch.stack([k, v]))
    more = torch.randn(2, 3, 2, 1, 5)
    all_k, all_v = kept.write(*more, 4)
    assert torch.equal(all_k, torch.cat([k, more[0]], 2)) and torch.equal(all_v, torch.cat([v, more[1]], 2))
    before = all_k.clone()
    kept.copy_rows(*moves(torch.tensor([2, 1, 1])), 5)
    assert torch.equal(kept.first(5)[0], before[[2, 1, 1]])
    kept.expand(2)
    assert torch.equal(kept.first(5)[0], before[[2, 2, 1, 1, 1, 1]])
    rows_k, _ = kept.write_rows(
        torch.ones(6, 2, 1, 5), torch.ones(6, 2, 1, 5), torch.arange(6), torch.tensor([0, 1, 2, 3, 4, 5]), 6
    )
    assert all((rows_k[b, :, b] == 1).all() for b in range(6)) and not (rows_k[0, :, 1:5] == 1).any()


def test_a_cache_needs_batch_first():
    attention = tfk.nn.MultiheadAttention(8, 2)
    cache = GrowingCache(4)
    cache.prepare(1)
    x = torch.randn(1, 2, 8)
    with pytest.raises(ValueError, match="a cache needs batch_first"):
        attention(x, x, x, attn_mask=cache)


# --- Hugging Face models ----------------------------------------------------------------------------------------------


def gpt2():
    hf = transformers()
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "n_positions": 40, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, initializer_range=0.4, bos_token_id=1, eos_token_id=2)).eval()


def bart():
    hf = transformers()
    torch.manual_seed(0)
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 40}
    config = hf.BartConfig(
        **sizes, **heads, vocab_size=V, init_std=0.4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, forced_eos_token_id=None,
    )  # fmt: skip
    return hf.BartForConditionalGeneration(config).eval()


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("make", [gpt2, bart])
def test_transformers_models_generate_what_they_generate_themselves(make, beams, patched):
    model, ids = make(), torch.randint(3, V, (3, 6), generator=torch.Generator().manual_seed(1))
    own = {"max_new_tokens": NEW, "do_sample": False, "num_beams": beams}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **own)
    if patched:
        tfk.patch(model)
    found = tfk.generate(model, ids, NEW, num_beams=beams)
    assert torch.equal(found, tfk.generate(model, ids, NEW, num_beams=beams, use_cache=False))
    for row, wanted in zip(found, expected, strict=True):
        stops = (wanted[1:] == 2).nonzero()
        end = int(stops[0]) + 2 if len(stops) else len(wanted)
        assert torch.equal(row[:end], wanted[:end])


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("patched", [False, True])
def test_transformers_prompts_of_different_lengths(beams, patched):
    model = gpt2()
    model.config.pad_token_id = model.generation_config.pad_token_id = 0
    if patched:
        tfk.patch(model)
    ids = spread("causal", "right")
    found = tfk.generate(model, ids, NEW, num_beams=beams, eos_id=[])
    for row, given in zip(found, ids, strict=True):
        alone = tfk.generate(model, given[given != 0][None], NEW, num_beams=beams, eos_id=[])[0]
        assert torch.equal(row[: len(alone)], alone) and not row[len(alone) :].any()


SIZES = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "intermediate_size": 48, "initializer_range": 0.4}
OTHERS = {  # what keeps no keys and values, keeps more than these, or counts padding as positions
    "Rwkv": {**SIZES, "context_length": 64},
    "Mamba": {**SIZES, "state_size": 8, "initializer_range": 0.4},
    "Lfm2": {**SIZES, **HEADS, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
    "Roberta": {**SIZES, **HEADS, "is_decoder": True, "max_position_embeddings": 40},
    "Bart": {
        "vocab_size": V, "d_model": 32, "decoder_layers": 2, "decoder_ffn_dim": 48, "decoder_attention_heads": 4,
        "init_std": 0.4, "is_decoder": True, "is_encoder_decoder": False, "max_position_embeddings": 40,
    },
    "OpenAIGPT": {
        "vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40, "initializer_range": 0.4,
    },
}  # fmt: skip
CLASSES = {"OpenAIGPT": "OpenAIGPTLMHeadModel"}


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", OTHERS)
def test_transformers_models_of_another_kind(family, beams):
    hf = transformers()
    torch.manual_seed(0)
    config = getattr(hf, f"{family}Config")(**OTHERS[family], pad_token_id=0, bos_token_id=1, eos_token_id=None)
    model = getattr(hf, CLASSES.get(family, f"{family}ForCausalLM"))(config).eval()
    ids = spread("causal", "right")
    found = tfk.generate(model, ids, NEW, num_beams=beams)
    for row, given in zip(found, ids, strict=True):
        prompt = given[given != 0][None]
        alone = tfk.generate(model, prompt, NEW, num_beams=beams, use_cache=False)[0]
        assert torch.equal(row[: len(alone)], alone) and not row[len(alone) :].any()
        if beams == 1:
            wanted = prompt
            for _ in range(NEW):
                scores = model(input_ids=wanted, use_cache=False).logits[:, -1]
                wanted = torch.cat([wanted, scores[:, 1:].argmax(-1, keepdim=True) + 1], 1)  # never padding
            assert torch.equal(alone, wanted[0])


def test_a_stop_that_was_taken_away_stays_away():
    model = gpt2()
    model.generation_config.eos_token_id = None
    ids = torch.randint(3, V, (3, 6), generator=torch.Generator().manual_seed(1))
    assert torch.equal(tfk.generate(model, ids, NEW), tfk.generate(model, ids, NEW, eos_id=[]))


def test_transformers_sources_of_different_lengths():
    model = bart()
    tfk.patch(model)
    ids = spread("causal", "right")
    found = tfk.generate(model, ids, NEW, num_beams=2, eos_id=[])
    for row, given in zip(found, ids, strict=True):
        assert torch.equal(row, tfk.generate(model, given[given != 0][None], NEW, num_beams=2, eos_id=[])[0])


def test_transformers_cache_grows_in_place():
    model = gpt2()
    seen = []
    attention = model.transformer.h[0].attn
    attention.register_forward_hook(
        lambda m, args, kwargs, out: seen.append(
            (kwargs.get("cache") or kwargs["past_key_values"]).layers[0].keys.data_ptr()  # named so until 5.23
        ),
        with_kwargs=True,
    )
    tfk.generate(model, torch.randint(3, V, (2, 4)), 4, eos_id=[])
    assert len(seen) == 4 and len(set(seen)) == 1


def test_a_model_that_gives_no_scores_is_refused():
    hf = transformers()
    model = hf.GPT2Model(hf.GPT2Config(vocab_size=V, n_embd=32, n_layer=1, n_head=4))
    with pytest.raises(ValueError, match="generate: model must give scores of next tokens, .* got GPT2Model"):
        tfk.generate(model, torch.ones(1, 2, dtype=torch.long), 3)
    with pytest.raises(TypeError, match="generate: model must be a CausalLanguageModel, .* got Linear"):
        tfk.generate(nn.Linear(2, 2), torch.ones(1, 2, dtype=torch.long), 3)
