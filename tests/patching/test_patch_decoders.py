"""patch() on decoder-only models of Gemma's and other families, small and with random weights."""

import copy
import pickle

import pytest
import torch

import tfm_kernels as tfk
from tests.patching.models import (
    SUMMED_IN_FLOAT32,
    assert_compiles,
    assert_dropout_proven,
    assert_same_results,
    batch,
    decoder,
)
from tfm_kernels.patching import swap

ROTARY = "rotary positions in one pass; attention through transformers' AttentionInterface"
SUM = "sum and RMSNorm in one pass"
CAPPED = "rotary positions in one pass; not more, because it caps its logits"
WINDOW = dict(sliding_window=4, layer_types=["sliding_attention", "full_attention"])
SIDE_BY_SIDE = "because its branches run side by side, so that no norm follows a sum in it"
FAMILIES = {
    "gemma": {},
    "gemma2": WINDOW,
    "gemma3_text": WINDOW,
    "phi3": {"sliding_window": 4, "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4}},
    "olmo2": {},
    "olmo3": WINDOW,
    "apertus": {},
    "smollm3": {"no_rope_layers": [1, 0], "use_sliding_window": False},
    "gpt_neox": {"use_parallel_residual": False, "rotary_pct": 0.5},
    "gpt_neox, side by side": {"rotary_pct": 0.5},
    "falcon": {"new_decoder_architecture": True},
    "falcon, one key": {"multi_query": True},
    "falcon, alibi": {"multi_query": False, "num_kv_heads": 4, "parallel_attn": False, "alibi": True, "bias": True},
}
RMS = {family for family in FAMILIES if not family.startswith(("gpt_neox", "falcon"))}
EXPECTED = {  # class name -> (how many, what the report says)
    "gemma": {
        "GemmaAttention": (2, ROTARY),
        "GemmaDecoderLayer": (2, SUM),
        "GemmaMLP": (2, "feed-forward"),
        "GemmaRMSNorm": (3, "rms_norm"),
    },
    "gemma2": {
        "Gemma2Attention": (2, CAPPED),
        "Gemma2DecoderLayer": (2, SUM),
        "Gemma2MLP": (2, "feed-forward"),
        "Gemma2RMSNorm": (7, "rms_norm"),
    },
    "gemma3_text": {
        "Gemma3Attention": (2, ROTARY),
        "Gemma3DecoderLayer": (2, SUM),
        "Gemma3MLP": (2, "feed-forward"),
        "Gemma3RMSNorm": (11, "rms_norm"),
    },
    "phi3": {
        "Phi3Attention": (2, ROTARY),
        "Phi3DecoderLayer": (2, f"dropout, {SUM}"),
        "Phi3MLP": (2, "feed-forward"),
        "Phi3RMSNorm": (3, "rms_norm"),
    },
    "olmo2": {"Olmo2Attention": (2, ROTARY), "Olmo2MLP": (2, "feed-forward"), "Olmo2RMSNorm": (9, "rms_norm")},
    "olmo3": {"Olmo3Attention": (2, ROTARY), "Olmo3MLP": (2, "feed-forward"), "Olmo3RMSNorm": (9, "rms_norm")},
    "apertus": {"ApertusAttention": (2, ROTARY), "ApertusRMSNorm": (9, "rms_norm")},
    "smollm3": {
        "SmolLM3Attention": (2, ROTARY),
        "SmolLM3DecoderLayer": (2, SUM),
        "SmolLM3MLP": (2, "feed-forward"),
        "SmolLM3RMSNorm": (3, "rms_norm"),
    },
    "gpt_neox": {
        "GPTNeoXAttention": (2, ROTARY),
        "GPTNeoXLayer": (2, "dropout, sum and LayerNorm in one pass"),
        "GPTNeoXMLP": (2, "feed-forward"),
    },
    "gpt_neox, side by side": {"GPTNeoXAttention": (2, ROTARY), "GPTNeoXMLP": (2, "feed-forward")},
    **dict.fromkeys(
        ("falcon", "falcon, one key", "falcon, alibi"),
        {
            "FalconAttention": (2, "rotary positions in one pass, and attention"),
            "FalconMLP": (2, "feed-forward"),
        },
    ),
}
FLOAT64 = "in float64 its own code takes the variance in float32"


def build(family):
    return decoder(family.partition(",")[0], **FAMILIES[family])


def run_of(family, **more):
    """Gemma 2's own attention gives NaN in float64 where a query sees nothing, as padding beyond the window does."""
    ids, mask = batch(length=9, lengths=(9, 9, 9) if family == "gemma2" else (5, 9, 3))
    return lambda m: m(ids, attention_mask=mask, use_cache=False, **more).logits[mask.bool()]


@pytest.mark.parametrize("family", FAMILIES)
def test_same_numbers(family):
    model = build(family)
    with tfk.patch(model) as report:
        for kind, (count, what) in EXPECTED[family].items():
            fused = [entry.note for entry in report.replaced if entry.kind == kind]
            assert fused.count(what) == count, f"{kind}: {fused}"
    packed = family not in SUMMED_IN_FLOAT32  # whose rows, packed, are summed in another order
    assert_same_results(model, run_of(family), double_fallbacks=FLOAT64 if family in RMS else None, packed=packed)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_proven(family, dtype, train):
    ids, mask = batch(length=9, lengths=(9, 9, 9))
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    report = tfk.prove(build(family).train(train), inputs, dtype=dtype, steps=2)
    assert report.passed, report.table()
    assert not any("original code" in note for note in report.notes), report.notes


STATIC = {"cache_implementation": "static"}
GENERATION = [(f, options) for f in FAMILIES for options in ({}, {"num_beams": 2}, STATIC)]
GENERATION.remove(("falcon, alibi", STATIC))  # which stock transformers does not run


@pytest.mark.parametrize("family, options", GENERATION, ids=str)
def test_generation(family, options):
    model = build(family)
    ids = batch()[0]
    told = dict(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None, **options)
    wanted = model.generate(ids, **told)
    with tfk.patch(model):
        assert torch.equal(model.generate(ids, **told), wanted)


@pytest.mark.parametrize("backend", ["reference", "aten"])
@pytest.mark.parametrize("family", FAMILIES)
def test_autocast(family, backend):
    """Apertus norms queries of 16 bits by weights of 32, and goes on in 32."""
    model, run = build(family), run_of(family)
    exact = run(model.double()).detach()
    model.float()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        stock = run(model)
        with tfk.patch(model, backend=backend) as report:
            given = run(model)
            met = {reason for counts in report.fallbacks.values() for reason in counts}
            assert met == ({"its weight has another dtype than its input"} if family == "apertus" else set())
    assert given.dtype == stock.dtype
    assert (given - exact).norm() <= 1.5 * (stock - exact).norm()


COMPILED = ("gemma2", "falcon, alibi", "gpt_neox", "phi3")  # by every run; a graph takes seconds


@pytest.mark.parametrize("family", [f if f in COMPILED else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES])
def test_compiled(family):
    assert_compiles(build(family), run_of(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_copies_pickles_and_the_way_back(family):
    model, run = build(family), run_of(family)
    stock, classes = run(model), [type(module) for module in model.modules()]
    implementation = model.config._attn_implementation
    with tfk.patch(model) as report:
        wanted = run(model)
        for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert [type(module) for module in each.modules()] == [type(module) for module in model.modules()]
            assert torch.equal(run(each), wanted)
            tfk.unpatch(each)
            assert torch.equal(run(each), stock)
        assert report.fallbacks == {}
    assert [type(module) for module in model.modules()] == classes
    assert model.config._attn_implementation == implementation
    assert not any(swap.OPTIONS in module.__dict__ for module in model.modules())
    assert torch.equal(run(model), stock)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_and_hidden_states(family):
    model = build(family).train()
    run = run_of(family, output_hidden_states=True)
    wanted = run(model)
    with tfk.patch(model, packed=False) as report:
        torch.testing.assert_close(run(model), wanted)
        model.gradient_checkpointing_enable()
        torch.testing.assert_close(run(model), wanted)
        assert report.fallbacks == {}


MIDDLE = {
    "gemma": "post_attention_layernorm",
    "gemma2": "pre_feedforward_layernorm",
    "gemma3_text": "pre_feedforward_layernorm",
    "phi3": "post_attention_layernorm",
    "gpt_neox": "post_attention_layernorm",
}


@pytest.mark.parametrize("family", MIDDLE)
def test_a_hooked_norm_is_called(family):
    model, run = build(family), run_of(family)
    wanted, seen = run(model), []
    place, layer = next((n, m) for n, m in model.named_modules() if n.endswith("layers.1"))
    name = MIDDLE[family]
    layer.get_submodule(name).register_forward_hook(lambda *_: seen.append(1))
    with tfk.patch(model) as report:
        note = next(entry.note for entry in report.entries if entry.name == place)
        assert note == f"because {name} has hooks"
        torch.testing.assert_close(run(model), wanted)
    assert seen == [1]
    layer.get_submodule(name)._forward_hooks.clear()
    with tfk.patch(model) as report:
        layer.get_submodule(name).register_forward_hook(lambda *_: seen.append(2))
        torch.testing.assert_close(run(model), wanted)
        assert report.fallbacks[place] == {f"{name} has hooks": 1}
    assert seen == [1, 2]


def test_why_gemma_2_keeps_its_attention():
    with tfk.patch(build("gemma2")) as report:
        assert report.entries[0].note == "because its attention caps its logits"
        assert not report.entries[0].replaced


def test_why_branches_side_by_side_stay():
    with tfk.patch(build("gpt_neox, side by side")) as report:
        assert {entry.note for entry in report.kept if entry.kind == "GPTNeoXLayer"} == {SIDE_BY_SIDE}


@pytest.mark.parametrize("family, dropout", [("phi3", "resid_pdrop"), ("gpt_neox", "hidden_dropout")])
def test_dropout_in_training(family, dropout):
    assert_dropout_proven(decoder(family, **FAMILIES[family], **{dropout: 0.3}))


def test_weights_of_8_bits():
    model, run = build("phi3"), run_of("phi3")
    tfk.quantize(model, "int8_weight_only")
    wanted = run(model)
    with tfk.patch(model) as report:
        torch.testing.assert_close(run(model), wanted)
        assert report.fallbacks == {}


def test_why_falcon_falls_back():
    model, run = build("falcon"), run_of("falcon")
    ids = batch()[0]
    wanted = model(ids, output_attentions=True)
    with tfk.patch(model) as report:
        given = model(ids, output_attentions=True)
        assert report.fallbacks["transformer.h.0.self_attention"] == {"output_attentions was asked for": 1}
        torch.testing.assert_close(given.attentions, wanted.attentions)
    model.config._attn_implementation = "eager"
    with tfk.patch(model) as report:
        run(model)
        reason = "its attention implementation is 'eager', not 'sdpa'"
        assert report.fallbacks["transformer.h.0.self_attention"] == {reason: 1}
