"""patch() on decoder-only models that pair other features, norm otherwise or turn a part of a head."""

import copy
import pickle

import pytest
import torch

import tfm_kernels as tfk
from tests.patching.models import assert_same_results, batch, decoder
from tests.patching.test_patch_decoders import FLOAT64, ROTARY, SIDE_BY_SIDE, SUM, WINDOW

PART = {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4, "rope_type": "default"}}
LAYER_NORM = "sum and LayerNorm in one pass"
UNKNOWN = "because no recipe knows Exaone4DecoderLayer"
MULTIPLIERS = dict(residual_multiplier=0.5, attention_multiplier=0.3, embedding_multiplier=2.0, logits_scaling=3.0)
FAMILIES = {  # settings, what the report says of a layer, how many norms stand alone
    "cohere": ({}, SIDE_BY_SIDE, 3),
    "cohere, normed": ({"use_qk_norm": True}, SIDE_BY_SIDE, 7),
    "cohere2": (WINDOW, SIDE_BY_SIDE, 3),
    "glm": (PART, SUM, 3),
    "glm4": (PART, SUM, 7),
    "phi": ({**PART, "qk_layernorm": True}, SIDE_BY_SIDE, 7),
    "stablelm": (PART, LAYER_NORM, 3),
    "stablelm, side by side": ({**PART, "use_parallel_residual": True, "qk_layernorm": True}, SIDE_BY_SIDE, 15),
    "starcoder2": ({"sliding_window": 4}, LAYER_NORM, 3),
    "olmo": ({"clip_qkv": 0.05}, LAYER_NORM, 3),
    "gptj": ({}, SIDE_BY_SIDE, 3),
    "codegen": ({}, SIDE_BY_SIDE, 3),
    "ernie4_5": ({}, SUM, 3),
    "helium": ({}, SUM, 3),
    "granite": (MULTIPLIERS, SUM, 3),
    "exaone4": (WINDOW, UNKNOWN, 9),
    "nemotron": (PART, LAYER_NORM, 3),
    "persimmon": ({**PART, "qk_layernorm": True}, LAYER_NORM, 7),
    "mixtral": ({}, SUM, 3),
    "phimoe": ({}, LAYER_NORM, 3),
}
WIDE = ("phi", "phi3", "stablelm", "starcoder2", "gptj", "codegen", "nemotron", "persimmon", "phimoe")


def build(family, **changes):
    return decoder(family.partition(",")[0], **FAMILIES[family][0], **changes)


def run_of(**more):
    ids, mask = batch(length=9, lengths=(5, 9, 3))
    return lambda m: m(ids, attention_mask=mask, use_cache=False, **more).logits[mask.bool()]


@pytest.mark.parametrize("family", FAMILIES)
def test_same_numbers(family):
    _, layer, norms = FAMILIES[family]
    model = build(family)
    with tfk.patch(model) as report:
        notes = [entry.note for entry in report.entries]
        assert notes.count(ROTARY) == 2 and notes.count(layer) == 2, str(report)
        assert notes.count("rms_norm") + notes.count("layer_norm") == norms, str(report)
    own = None if family.partition(",")[0] in WIDE else FLOAT64
    assert_same_results(model, run_of(), double_fallbacks=own)


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


@pytest.mark.parametrize("family", ["cohere, normed", "glm4", "stablelm", "olmo", "gptj", "nemotron"])
def test_compiled(family):
    model, run = build(family, num_hidden_layers=1), run_of()
    stock = run(model)
    with tfk.patch(model):
        given = run(torch.compile(model, fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(given, stock)
    torch._dynamo.reset()


_BEHIND = {"its weight has another dtype than its input"}  # norms of what a product in 16 bits gives, to go on in 32
MET_UNDER_AUTOCAST = {
    "glm4": _BEHIND,
    "exaone4": _BEHIND,
    "nemotron": {"under autocast its own code takes its input in 16 bits"},
}


@pytest.mark.parametrize("family", FAMILIES)
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


@pytest.mark.parametrize("family, dropout", [("starcoder2", "residual_dropout"), ("stablelm", "hidden_dropout"),
                                             ("gptj", "resid_pdrop")])  # fmt: skip
def test_dropout_in_training(family, dropout):
    """prove() lets both models drop the same elements; what is dropped shows in what it gives."""
    model = build(family, **{dropout: 0.3}).train()
    ids, mask = batch(length=9, lengths=(9, 9, 9))
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    report = tfk.prove(model, inputs, steps=1)
    assert report.passed, report.table()
    with tfk.patch(model), torch.no_grad():
        dropped = model(**inputs).logits
        assert not torch.allclose(dropped, model.eval()(**inputs).logits, atol=1e-3)
