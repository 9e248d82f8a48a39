"""patch() on ALBERT: what its shared layers, their groups and its own dropouts add to tests of the BERT family."""

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from tests.patching.models import albert, assert_dropout_proven, assert_same_results, batch, results, transformers

LAYER = "encoder.albert_layer_groups.0.albert_layers.0"
INSIDE = ("query", "key", "value", "dense", "attention_dropout", "output_dropout")


def run_on(ids, mask, **more):
    return lambda m: m(input_ids=ids, attention_mask=mask, **more).last_hidden_state


def notes(report):
    return {entry.name: entry.note for entry in report.entries}


def test_layer_and_stack_are_fused():
    with tfk.patch(albert()) as report:
        told, replaced = notes(report), {entry.name for entry in report.replaced}
    assert {"encoder", LAYER} <= replaced
    assert told["encoder"].startswith("padded batches run packed") and "feed-forward" in told[LAYER]
    for inner in ("ffn", "ffn_output", "activation", *(f"attention.{name}" for name in INSIDE)):
        assert told[f"{LAYER}.{inner}"] == f"runs inside {LAYER}"


@pytest.mark.parametrize("layers, groups, inside", [(1, 1, 1), (4, 1, 1), (4, 2, 1), (3, 1, 2), (4, 4, 1), (5, 2, 2)])
def test_groups_of_layers(layers, groups, inside):
    model = albert(num_hidden_layers=layers, num_hidden_groups=groups, inner_group_num=inside)
    ids, mask = batch()
    assert_same_results(model, run_on(ids, mask), mask.bool())
    assert_same_results(model, run_on(ids, mask), mask.bool(), packed=False)


@pytest.mark.parametrize("name", ["relu", "gelu", "silu"])
def test_activations(name):
    ids, mask = batch()
    assert_same_results(albert(hidden_act=name), run_on(ids, mask), mask.bool())


def test_heads_read_what_they_read():
    hf, (ids, mask) = transformers(), batch()
    spans = torch.tensor([1, 2, 0])
    heads = {
        "AlbertForMaskedLM": {"labels": ids.masked_fill(mask == 0, -100)},
        "AlbertForTokenClassification": {"labels": (ids % 2).masked_fill(mask == 0, -100)},
        "AlbertForSequenceClassification": {"labels": torch.tensor([0, 1, 0])},
        "AlbertForQuestionAnswering": {"start_positions": spans, "end_positions": spans + 1},
    }
    for name, more in heads.items():
        torch.manual_seed(0)
        model = getattr(hf, name)(albert().config).eval()
        assert_same_results(model, lambda m, more=more: m(input_ids=ids, attention_mask=mask, **more).loss)
        with tfk.patch(model) as report:
            spans_head = "because its model's head reads all positions, padding too"
            assert (notes(report)["albert.encoder"] == spans_head) == ("Question" in name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_proven(training, padded, dtype):
    ids, mask = batch(length=9, lengths=(5, 9, 3) if padded else (9, 9, 9))
    inputs = {"input_ids": ids, "attention_mask": mask}
    report = tfk.prove(albert().train(training), inputs, dtype=dtype, steps=1)
    assert report.passed, report.table()
    assert not any("original code" in note for note in report.notes), report.notes


@pytest.mark.parametrize("name", ["hidden_dropout_prob", "attention_probs_dropout_prob"])
def test_each_dropout_is_dropped_where_it_was(name):
    model = albert(**{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, name: 0.3})
    model.embeddings.dropout.p = 0.0
    ids, mask = batch()
    inputs = {"input_ids": ids, "attention_mask": mask}
    assert_dropout_proven(model, inputs, lambda out: out.last_hidden_state[mask.bool()])


COLLECTS = "output_hidden_states or output_attentions was asked for"
REASONS = {
    "left padding": ({}, "a row begins with padding"),
    "hidden states": ({"output_hidden_states": True}, COLLECTS),
    "attentions": ({"output_attentions": True}, COLLECTS),
}


@pytest.mark.parametrize("case", REASONS)
def test_falls_back(case):
    more, reason = REASONS[case]
    model, (ids, mask) = albert(), batch()
    mask = mask.flip(1) if case == "left padding" else mask
    model.set_attn_implementation("eager")
    stock, live = model(ids, attention_mask=mask, **more), mask.bool()
    with tfk.patch(model) as report:
        out = model(ids, attention_mask=mask, **more)
        assert report.fallbacks["encoder"] == {reason: 1}
    torch.testing.assert_close(out.last_hidden_state[live], stock.last_hidden_state[live])
    for a, b in zip(out.hidden_states or (), stock.hidden_states or (), strict=True):
        torch.testing.assert_close(a[live], b[live])
    for a, b in zip(out.attentions or (), stock.attentions or (), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert case != "attentions" or len(out.attentions) == 3
    assert case != "hidden states" or len(out.hidden_states) == 4


def test_chunks_of_the_feed_forward():
    model, (ids, mask) = albert(chunk_size_feed_forward=1), batch()
    stock = run_on(ids, mask)(model)
    with tfk.patch(model) as report:
        torch.testing.assert_close(run_on(ids, mask)(model)[mask.bool()], stock[mask.bool()])
        assert report.fallbacks[LAYER] == {"config.chunk_size_feed_forward is set": 2}
        assert "layer 0 cannot run packed: config.chunk_size_feed_forward is set" in report.fallbacks["encoder"]


@pytest.mark.parametrize("place", ["encoder.embedding_hidden_mapping_in", "encoder.albert_layer_groups.1"])
def test_who_watches_what_the_stack_calls_sees_padded_batches(place):
    model, (ids, mask), seen = albert(), batch(), []
    stock = run_on(ids, mask)(model)
    with tfk.patch(model) as report:
        handle = model.get_submodule(place).register_forward_hook(lambda *a: seen.append(a[2].shape))
        torch.testing.assert_close(run_on(ids, mask)(model), stock)
        assert seen == [(3, 7, 32)]
        assert report.fallbacks == {"encoder": {f"{place.removeprefix('encoder.')} has hooks": 1}}
        handle.remove()
        assert not run_on(ids, mask)(model)[mask == 0].any() and len(seen) == 1


def test_an_adapter_in_attention_leaves_the_feed_forward_fused():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model, (ids, mask) = albert(), batch()
    layer = model.get_submodule(LAYER)
    adapter = Doubled(32, 32)
    adapter.load_state_dict(layer.attention.query.state_dict())
    layer.attention.query = adapter
    stock = run_on(ids, mask)(model)
    with tfk.patch(model) as report:
        wanted = "feed-forward; not more, because attention.query is Doubled, not Linear"
        assert notes(report)[LAYER] == wanted
        torch.testing.assert_close(run_on(ids, mask)(model)[mask.bool()], stock[mask.bool()])
        assert "layer 0 cannot run packed: attention.query is Doubled, not Linear" in report.fallbacks["encoder"]


def test_changed_code_is_left_as_it_is():
    """A subclass with its own forward: a layer, or a group between the stack and its layers."""
    hf, (ids, mask) = transformers(), batch()
    own = hf.models.albert.modeling_albert

    class Layer(own.AlbertLayer):
        def forward(self, hidden_states, attention_mask=None, **kwargs):
            return super().forward(hidden_states, attention_mask, **kwargs) * 2

    class Group(own.AlbertLayerGroup):
        def forward(self, hidden_states, attention_mask=None, **kwargs):
            return super().forward(hidden_states, attention_mask, **kwargs) + hidden_states.mean(1, keepdim=True)

    for cls, place in ((Layer, LAYER), (Group, "encoder.albert_layer_groups.0")):
        model = albert()
        model.get_submodule(place).__class__ = cls
        stock = run_on(ids, mask)(model)
        with tfk.patch(model) as report:
            torch.testing.assert_close(run_on(ids, mask)(model)[mask.bool()], stock[mask.bool()])
            assert "whose forward is not the known one" in str(report) or "its forward is not" in notes(report)[LAYER]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(backend):
    model, (ids, mask) = albert(), batch()
    model.pooler = None
    stock = results(model, run_on(ids, mask), mask.bool())
    with tfk.patch(model) as report:
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        given = results(model, lambda m: run_on(ids, mask)(compiled), mask.bool())
        assert report.fallbacks == {}
    torch._dynamo.reset()
    torch.testing.assert_close(given, stock, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_autocast(packed):
    model, (ids, mask) = albert(), batch()
    exact = run_on(ids, mask)(model.double()).detach()[mask.bool()]
    model.float()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        stock = run_on(ids, mask)(model)[mask.bool()]
        with tfk.patch(model, packed=packed) as report:
            given = run_on(ids, mask)(model)[mask.bool()]
            assert report.fallbacks == {}
    assert given.dtype == stock.dtype
    assert (given - exact).norm() <= 1.5 * (stock - exact).norm()
