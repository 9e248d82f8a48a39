"""patch() on decoder-only models that pair other features, norm otherwise, turn a part of a head or nothing."""

import copy
import pickle
import sys

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
    keeps_attention,
)
from tests.patching.test_patch_decoders import FLOAT64, ROTARY, SIDE_BY_SIDE, SUM, WINDOW

PART = {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4, "rope_type": "default"}}
MULTIPLIERS = dict(residual_multiplier=0.5, attention_multiplier=0.3, embedding_multiplier=2.0, logits_scaling=3.0)
LAYER_NORM = "sum and LayerNorm in one pass"
ATTENTION_AND_SUM = f"attention, and {LAYER_NORM}"
SUMS_AND_FFN = "sums with LayerNorm, and feed-forward"
FFN, NORM, RMS = "feed-forward", "layer_norm", "rms_norm"
KEPT = "because its attention does not go through transformers' AttentionInterface"
FAMILIES = {  # settings, and how often the report says what
    "cohere": ({}, {ROTARY: 2, SIDE_BY_SIDE: 2, NORM: 3}),
    "cohere, normed": ({"use_qk_norm": True}, {ROTARY: 2, SIDE_BY_SIDE: 2, NORM: 7}),
    "cohere2": (WINDOW, {ROTARY: 2, SIDE_BY_SIDE: 2, NORM: 3}),
    "glm": (PART, {ROTARY: 2, SUM: 2, RMS: 3}),
    "glm4": (PART, {ROTARY: 2, SUM: 2, RMS: 7}),
    "phi": ({**PART, "qk_layernorm": True}, {ROTARY: 2, SIDE_BY_SIDE: 2, NORM: 7}),
    "stablelm": (PART, {ROTARY: 2, LAYER_NORM: 2, NORM: 3}),
    "stablelm, side by side": (
        {**PART, "use_parallel_residual": True, "qk_layernorm": True}, {ROTARY: 2, SIDE_BY_SIDE: 2, NORM: 15},
    ),
    "starcoder2": ({"sliding_window": 4}, {ROTARY: 2, LAYER_NORM: 2, NORM: 3, FFN: 2}),
    "olmo": ({"clip_qkv": 0.05}, {ROTARY: 2, LAYER_NORM: 2, NORM: 3}),
    "gptj": ({}, {ROTARY: 2, SIDE_BY_SIDE: 2, NORM: 3, FFN: 2}),
    "codegen": ({}, {ROTARY: 2, SIDE_BY_SIDE: 2, NORM: 3, FFN: 2}),
    "ernie4_5": ({}, {ROTARY: 2, SUM: 2, RMS: 3}),
    "helium": ({}, {ROTARY: 2, SUM: 2, RMS: 3}),
    "granite": (MULTIPLIERS, {ROTARY: 2, SUM: 2, RMS: 3}),
    "granitemoe": (MULTIPLIERS, {ROTARY: 2, SUM: 2, RMS: 3}),
    "olmoe": ({"clip_qkv": 0.5}, {ROTARY: 2, SUM: 2, RMS: 7}),
    "exaone4": (WINDOW, {ROTARY: 2, RMS: 9}),
    "nemotron": (PART, {ROTARY: 2, LAYER_NORM: 2, NORM: 3}),
    "persimmon": ({**PART, "qk_layernorm": True}, {ROTARY: 2, LAYER_NORM: 2, NORM: 7}),
    "mixtral": ({}, {ROTARY: 2, SUM: 2, RMS: 3}),
    "phimoe": ({}, {ROTARY: 2, LAYER_NORM: 2, NORM: 3}),
    "bloom": ({}, {ATTENTION_AND_SUM: 2, FFN: 2, NORM: 4}),
    "bloom, normed sums": ({"apply_residual_connection_post_layernorm": True}, {ATTENTION_AND_SUM: 2}),
    "mpt": ({}, {ATTENTION_AND_SUM: 2, FFN: 2, NORM: 3}),
    "mpt, clipped": ({"attn_config": {"clip_qkv": 0.05, "alibi": True}}, {ATTENTION_AND_SUM: 2, FFN: 2, NORM: 3}),
    "gpt_neo": ({}, {"attention": 2, LAYER_NORM: 2, FFN: 2, NORM: 3}),
    "gpt_bigcode": ({}, {LAYER_NORM: 2, FFN: 2, NORM: 3}),
    "xglm": ({}, {"attention": 2, SUMS_AND_FFN: 2, NORM: 3}),
    "opt": ({}, {SUMS_AND_FFN: 2, NORM: 3}),
    "opt, behind": ({"do_layer_norm_before": False}, {SUMS_AND_FFN: 2, NORM: 0}),
}  # fmt: skip
NARROW = (
    "cohere cohere2 glm glm4 olmo ernie4_5 helium granite granitemoe olmoe exaone4 mixtral".split()
)  # norms in float32 whatever comes


SOFTMAX = "in float64 its own code takes the softmax in float32"
OWN = ("bloom", "mpt", "gpt_neo", "xglm")  # attention that knows no registry


def build(family, **changes):
    return decoder(family.partition(",")[0], **FAMILIES[family][0], **changes)


def run_of(**more):
    ids, mask = batch(length=9, lengths=(5, 9, 3))
    return lambda m: m(ids, attention_mask=mask, use_cache=False, **more).logits[mask.bool()]


@pytest.mark.parametrize("family", FAMILIES)
def test_same_numbers(family):
    model, counts = build(family), FAMILIES[family][1]
    if keeps_attention(model):
        counts = {**counts, ROTARY: 0, SIDE_BY_SIDE: 0, KEPT: 2}
    with tfk.patch(model) as report:
        notes = [entry.note for entry in report.entries]
        for what, count in counts.items():
            assert notes.count(what) == count, f"{what}: {notes.count(what)}\n{report}"
    kind = family.partition(",")[0]
    own = FLOAT64 if kind in NARROW else SOFTMAX if kind in ("bloom", "mpt", "gpt_neo") else None
    if family != "xglm":  # whose own code fails in float64
        assert_same_results(model, run_of(), double_fallbacks=own, packed=kind not in SUMMED_IN_FLOAT32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_proven(family, dtype):
    ids, mask = batch(length=9, lengths=(9, 9, 9))
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    report = tfk.prove(build(family).train(), inputs, dtype=dtype, steps=2)
    assert report.passed, report.table()
    assert not any("original code" in note for note in report.notes), report.notes


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_generation(family, options):
    model, ids = build(family), batch()[0]
    told = dict(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None, **options)
    wanted = model.generate(ids, **told)
    with tfk.patch(model) as report:
        assert torch.equal(model.generate(ids, **told), wanted)
        assert report.fallbacks == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_copies_pickles_and_the_way_back(family):
    model, run = build(family), run_of()
    stock, classes = run(model), [type(module) for module in model.modules()]
    with tfk.patch(model) as report:
        wanted = run(model)
        for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert [type(module) for module in each.modules()] == [type(module) for module in model.modules()]
            assert torch.equal(run(each), wanted)
        assert report.fallbacks == {}
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(run(model), stock)


SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in ("cohere, normed", "glm4", "nemotron", "bloom")]


@pytest.mark.parametrize("family", ["gptj", "gpt_neo", *SLOW])
def test_compiled(family):
    assert_compiles(build(family), run_of())


_BEHIND = {"its weight has another dtype than its input"}  # norms of what a product in 16 bits gives, to go on in 32
MET_UNDER_AUTOCAST = {
    "glm4": _BEHIND,
    "exaone4": _BEHIND,
    "olmoe": _BEHIND,
    "nemotron": {"under autocast its own code takes its input in 16 bits"},
}


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "xglm"])  # whose own code fails there
def test_autocast(family):
    model, run = build(family), run_of()
    exact = run(model.double()).detach()
    model.float()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        stock = run(model)
        with tfk.patch(model) as report:
            given = run(model)
            met = {reason for counts in report.fallbacks.values() for reason in counts}
    assert met == MET_UNDER_AUTOCAST.get(family, set())
    assert given.dtype == stock.dtype
    assert (given - exact).norm() <= 1.5 * (stock - exact).norm()


@pytest.mark.parametrize("family", ["cohere", "glm", "phi", "gptj"])
def test_positions_by_their_own_code_where_a_backend_has_none(family):
    """The op that they ask for is not there; no other may take its place."""
    model, run = build(family), run_of()
    wanted = run(model)
    with tfk.patch(model) as report, tfk.use_backend("reference"):
        torch.testing.assert_close(run(model), wanted)
        assert report.fallbacks == {}


def test_positions_whose_function_was_replaced_are_turned_by_the_new_one(monkeypatch):
    """Of pairs here: the old one must not go on, nor one of halves take its place."""
    model, run = build("cohere"), run_of()
    stock = run(model)
    with tfk.patch(model) as report:
        file = sys.modules[type(model.model.layers[0].self_attn).__module__]
        monkeypatch.setattr(file, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q * cos, k * sin))
        given = run(model)
        assert report.fallbacks == {}
    torch.testing.assert_close(given, run(model))
    assert not torch.equal(given, stock)


@pytest.mark.parametrize("family, dropout", [("starcoder2", "residual_dropout"), ("stablelm", "hidden_dropout"),
                                             ("gptj", "resid_pdrop")])  # fmt: skip
def test_dropout_in_training(family, dropout):
    assert_dropout_proven(build(family, **{dropout: 0.3}))


@pytest.mark.parametrize("family", [*OWN, "opt"])
def test_attention_weights(family):
    """Asked for weights, attention of their own runs as it is."""
    model, ids = build(family), batch()[0]
    model.set_attn_implementation("eager")
    wanted = model(ids, output_attentions=True)
    with tfk.patch(model):
        given = model(ids, output_attentions=True)
    torch.testing.assert_close(given.logits, wanted.logits)
    assert len(given.attentions) == len(wanted.attentions) == 2
    for weights, own in zip(given.attentions, wanted.attentions, strict=True):
        torch.testing.assert_close(weights, own)


@pytest.mark.parametrize("family", ["mpt", "gpt_neo", "xglm"])
def test_scores_of_a_mask_of_four_axes(family):
    """What a model is handed ready-made may add any number to the scores."""
    model, ids = build(family), batch()[0]
    torch.manual_seed(2)
    mask = torch.randn(3, 1, 7, 7).masked_fill(torch.ones(7, 7).triu(1).bool(), torch.finfo(torch.float32).min)
    if family == "mpt":
        mask = (mask < 0.3) & ~torch.eye(7, dtype=torch.bool)  # which reads no more of it than what is hidden
    wanted = model(ids, attention_mask=mask, use_cache=False).logits
    with tfk.patch(model) as report:
        torch.testing.assert_close(model(ids, attention_mask=mask, use_cache=False).logits, wanted)
        assert report.fallbacks == {}


@pytest.mark.parametrize("family", ["cohere", "granite", "gptj", "bloom", "mpt", "gpt_neo", "xglm", "opt, behind"])
def test_gradient_checkpointing_and_hidden_states(family):
    model, ids = build(family, dropout=0.0, attention_dropout=0.0).train(), batch()[0]
    run = lambda m: m(ids, use_cache=False, output_hidden_states=True)
    wanted = run(model)
    with tfk.patch(model) as report:
        for _ in ("as it is", "with checkpoints"):
            given = run(model)
            torch.testing.assert_close(given.logits, wanted.logits)
            torch.testing.assert_close(given.hidden_states, wanted.hidden_states)
            model.gradient_checkpointing_enable()
        assert report.fallbacks == {}


@pytest.mark.parametrize("family, name", [
    ("glm4", "model.layers.1.post_attention_layernorm"), ("olmo", "model.layers.1.post_attention_layernorm"),
    ("bloom", "transformer.h.1.self_attention"), ("mpt", "transformer.blocks.1.norm_2"),
    ("gpt_neo", "transformer.h.1.ln_2"), ("opt", "model.decoder.layers.1.fc1"), ("xglm", "model.layers.1.fc2"),
])  # fmt: skip
def test_a_hooked_child_is_called(family, name):
    """The fused code of its parent passes it by, or reads its weights."""
    model, run = build(family), run_of()
    wanted, seen = run(model), []
    with tfk.patch(model) as report:
        model.get_submodule(name).register_forward_hook(lambda *_: seen.append(1))
        torch.testing.assert_close(run(model), wanted)
        parent, _, child = name.rpartition(".")
        assert report.fallbacks[parent] == {f"{child} has hooks": 1}
    assert seen == [1]


@pytest.mark.parametrize("family", ["phi", "granite", "bloom", "opt"])
def test_weights_of_8_bits(family):
    model, run = build(family), run_of()
    tfk.quantize(model, "int8_weight_only")
    wanted = run(model)
    with tfk.patch(model) as report:
        torch.testing.assert_close(run(model), wanted)
        assert report.fallbacks == {}
