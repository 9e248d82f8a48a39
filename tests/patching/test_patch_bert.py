"""patch() on the BERT family of Hugging Face transformers."""

import contextlib

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from tests.patching.models import albert, assert_same_results, batch, bert, compare, distilbert, results, transformers

FAMILIES = {"bert": bert, "distilbert": distilbert, "albert": albert}
hidden = lambda model, **more: lambda m=model: m(**more).last_hidden_state


def run_on(ids, mask, **more):
    return lambda m: m(input_ids=ids, attention_mask=mask, **more).last_hidden_state


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("packed", [False, True])
def test_padded_batch(family, packed):
    ids, mask = batch()
    assert_same_results(FAMILIES[family](), run_on(ids, mask), mask.bool(), packed=packed)


@pytest.mark.parametrize("family", FAMILIES)
def test_batch_without_padding(family):
    ids, mask = batch(lengths=(7, 7, 7))
    assert_same_results(FAMILIES[family](), run_on(ids, mask))
    assert_same_results(FAMILIES[family](), run_on(ids, None))


def test_gelu_tanh_and_relu():
    ids, mask = batch()
    for name in ("gelu_new", "relu", "silu"):
        assert_same_results(bert(hidden_act=name), run_on(ids, mask), mask.bool())


RELATIVES = "Roberta Electra XLMRoberta Camembert Data2VecText Ernie RoCBert BertGeneration".split()


@pytest.mark.parametrize("name", RELATIVES)
def test_relatives_are_recognised(name):
    hf = transformers()
    config = getattr(hf, f"{name}Config")(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        embedding_size=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(hf, f"{name}{'Encoder' if name == 'BertGeneration' else 'Model'}")(config).eval()
    with tfk.patch(model) as report:
        names = {entry.name for entry in report.replaced}
        assert {"encoder", "encoder.layer.0", "encoder.layer.0.output", "encoder.layer.0.attention.output"} <= names
    ids, mask = batch()
    assert_same_results(model, run_on(ids, mask), mask.bool())


def test_padded_positions_are_zero_and_the_pooler_is_right():
    model, (ids, mask) = bert(), batch()
    stock = model(ids, attention_mask=mask)
    with tfk.patch(model):
        out = model(ids, attention_mask=mask)
    assert not out.last_hidden_state[mask == 0].any()
    torch.testing.assert_close(out.pooler_output, stock.pooler_output)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_dropout_is_the_padded_one(family):
    model, (ids, mask) = FAMILIES[family]().double().train(), batch()

    def run(m):
        torch.manual_seed(3)
        return m(ids, attention_mask=mask).last_hidden_state

    got = {}
    for packed in (False, True):
        with tfk.patch(model, packed=packed, backend="reference") as report:
            got[packed] = results(model, run, mask.bool())
            assert report.fallbacks == {}
    compare(got[True], got[False], 1e-10)


@pytest.mark.parametrize("name", ["BertForQuestionAnswering", "DistilBertForQuestionAnswering"])
def test_a_head_that_reads_padding_is_given_what_it_had(name):
    """Start and end are a softmax over all positions: zeros in place of padding would change loss and gradients."""
    cls = getattr(transformers(), name)
    body = distilbert() if name.startswith("Distil") else bert()
    model, (ids, mask) = cls(body.config).eval(), batch()
    spans = torch.tensor([1, 2, 0])

    def run(m):
        return m(input_ids=ids, attention_mask=mask, start_positions=spans, end_positions=spans + 1).loss

    assert_same_results(model, run)
    with tfk.patch(nn.ModuleList([model]), backend="reference") as report:
        notes = {entry.kind: entry.note for entry in report.kept}
        stack = notes["Transformer" if name.startswith("Distil") else "BertEncoder"]
        assert stack == "because its model's head reads all positions, padding too" and not report.notes
        assert {"BertLayer", "TransformerBlock"} & {entry.kind for entry in report.replaced}


REASONS = {
    "left padding": (dict(lengths=None), {}, "a row begins with padding"),
    "hidden states": ({}, dict(output_hidden_states=True), "output_hidden_states or output_attentions was asked for"),
    "attentions": ({}, dict(output_attentions=True), "output_hidden_states or output_attentions was asked for"),
}


@pytest.mark.parametrize("case", REASONS)
def test_packed_falls_back(case):
    _, more, reason = REASONS[case]
    model, (ids, mask) = bert(), batch()
    if case == "left padding":
        mask = mask.flip(1)
    stock = model(ids, attention_mask=mask, **more)
    with tfk.patch(model) as report:
        out = model(ids, attention_mask=mask, **more)
        assert report.fallbacks["encoder"] == {reason: 1}
        assert reason in str(report)
        live = mask.bool()
        torch.testing.assert_close(out.last_hidden_state[live], stock.last_hidden_state[live])
        if case == "hidden states":
            for a, b in zip(out.hidden_states, stock.hidden_states, strict=True):
                torch.testing.assert_close(a[live], b[live])
            again = model(ids, attention_mask=mask)  # the collectors stay, idle: packed again
            assert report.fallbacks["encoder"] == {reason: 1} and not again.last_hidden_state[~live].any()
    if case == "attentions":
        model.set_attn_implementation("eager")
        eager = model(ids, attention_mask=mask, output_attentions=True)
        for a, b in zip(out.attentions, eager.attentions, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("packed", [False, True])
def test_a_norm_over_the_sequence_too_keeps_its_layer(family, packed):
    model, (ids, mask) = FAMILIES[family](), batch()
    norms = {
        "bert": "encoder.layer.1.output.LayerNorm",
        "distilbert": "transformer.layer.1.output_layer_norm",
        "albert": "encoder.albert_layer_groups.1.albert_layers.0.full_layer_layer_norm",
    }
    model.set_submodule(norms[family], nn.LayerNorm((7, 32)))
    run = run_on(ids, mask)
    wanted = run(model.double())
    with tfk.patch(model, packed=packed, backend="reference") as report:
        torch.testing.assert_close(run(model), wanted)
        assert "normalises more than the last dimension" in str(report)


def test_a_mask_of_other_kind_runs_padded():
    model, (ids, mask) = bert(), batch()
    square = (mask[:, None, None, :] * mask[:, None, :, None]).bool() | torch.eye(7, dtype=torch.bool)
    stock = model(ids, attention_mask=square).last_hidden_state
    with tfk.patch(model) as report:
        torch.testing.assert_close(model(ids, attention_mask=square).last_hidden_state, stock)
        assert report.fallbacks == {"encoder": {"its mask is a matrix, which may hide more than padding": 1}}


def test_decoder_with_cross_attention_and_cache():
    hf = transformers()
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        is_decoder=True, add_cross_attention=True,
    )  # fmt: skip
    model = hf.BertLMHeadModel(config).eval()
    ids, mask = batch()
    memory = torch.randn(3, 5, 32)
    more = dict(attention_mask=mask, encoder_hidden_states=memory, encoder_attention_mask=mask[:, :5])
    stock = model(ids, **more).logits
    plain = model(ids, attention_mask=mask, use_cache=False).logits
    generated = model.generate(ids[:1, :3], max_new_tokens=4, do_sample=False, pad_token_id=0)
    with tfk.patch(model) as report:
        torch.testing.assert_close(model(ids, **more).logits[mask.bool()], stock[mask.bool()])
        assert "encoder_hidden_states or a cache" in str(report.fallbacks["bert.encoder.layer.0"])
        given = model(ids, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(given[mask.bool()], plain[mask.bool()])
        assert torch.equal(model.generate(ids[:1, :3], max_new_tokens=4, do_sample=False, pad_token_id=0), generated)


class LoraLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 0.5 * x.sum(-1, keepdim=True)


def test_adapters_and_hooks_keep_working():
    model, (ids, mask) = bert(), batch()
    layer = model.encoder.layer[0]
    adapter = LoraLinear(32, 32)
    adapter.load_state_dict(layer.attention.self.query.state_dict())
    layer.attention.self.query = adapter
    stock = run_on(ids, mask)(model)
    with tfk.patch(model) as report:
        note = next(entry.note for entry in report.entries if entry.name == "encoder.layer.0")
        assert "attention.self.query is LoraLinear, not Linear" in note
        torch.testing.assert_close(run_on(ids, mask)(model)[mask.bool()], stock[mask.bool()])
    seen = []
    plain = bert()
    with tfk.patch(plain) as report:
        handle = plain.encoder.layer[1].intermediate.register_forward_hook(lambda *a: seen.append(a[2].shape))
        run_on(ids, mask)(plain)
        assert seen == [(3, 7, 64)] and "layer 1 cannot run packed: intermediate has hooks" in str(report)
        handle.remove()
        run_on(ids, mask)(plain)
        assert len(seen) == 1


def test_gradient_checkpointing():
    model, (ids, mask) = bert().double().train(), batch()
    model.config._attn_implementation  # noqa: B018
    run = run_on(ids, mask)

    def seeded(m):
        torch.manual_seed(3)
        return run(m)

    with tfk.patch(model, backend="reference") as report:
        plain = results(model, seeded, mask.bool())
        model.gradient_checkpointing_enable()
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
            checkpointed = results(model, seeded, mask.bool())
        assert report.fallbacks == {}
    compare(checkpointed, plain, 1e-12)
    assert sum(saved) < 40_000  # 13 thousand numbers of two layers' inputs and embeddings, not their insides


@pytest.mark.parametrize("packed", [False, True])
def test_autocast(packed):
    model, (ids, mask) = bert(), batch()
    exact = run_on(ids, mask)(model.double()).detach()[mask.bool()]
    model.float()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        stock = run_on(ids, mask)(model)[mask.bool()]
        with tfk.patch(model, packed=packed) as report:
            given = run_on(ids, mask)(model)[mask.bool()]
            assert report.fallbacks == {}
    assert given.dtype == stock.dtype
    assert (given - exact).norm() <= 1.5 * (stock - exact).norm()


@contextlib.contextmanager
def no_eager_fallback(report):
    yield
    assert report.fallbacks == {}


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(backend):
    model, (ids, mask) = bert(num_hidden_layers=1), batch()
    stock = run_on(ids, mask)(model)
    with tfk.patch(model) as report, no_eager_fallback(report):
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        out = run_on(ids, mask)(compiled)
        torch.testing.assert_close(out[mask.bool()], stock[mask.bool()])
        out[mask.bool()].sum().backward()
        with torch.no_grad():
            torch.testing.assert_close(run_on(ids, None)(compiled), run_on(ids, None)(bert(num_hidden_layers=1)))
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace")
def test_traced_by_jit():
    """As the docstring of patch says: without gradients and without the check; the padding stays data."""
    model, (ids, mask) = bert(return_dict=False), batch()
    others, other = batch(lengths=(7, 3, 5))
    with tfk.patch(model, backend="reference"), torch.no_grad():
        traced = torch.jit.trace(model, (ids, mask), check_trace=False)
        wanted = model(others.flip(0), attention_mask=other)[0]
        live = other.bool()
        torch.testing.assert_close(traced(others.flip(0), other)[0][live], wanted[live])


class Counting:
    """A compiler that counts the calls of fused code and runs graphs as they are."""

    def __init__(self):
        self.fused = 0

    def __call__(self, graph, example):
        self.fused += sum("tfm_kernels" in str(node.target) for node in graph.graph.nodes)
        return graph


def test_what_once_collected_hidden_states_compiles_as_before():
    """Transformers leaves its hooks where they are: a compiled graph asks whether they collect, too."""
    model, (ids, mask) = bert(num_hidden_layers=1), batch()
    stock = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
    counted = []
    with tfk.patch(model), torch.no_grad():
        for more in ({}, {"output_hidden_states": True}, {}):
            torch._dynamo.reset()
            count = Counting()
            found = torch.compile(model, fullgraph=True, backend=count)(ids, attention_mask=mask, **more)
            counted.append(count.fused)
            if more:
                torch.testing.assert_close(found.hidden_states, stock)
            model(ids, attention_mask=mask, output_hidden_states=True)
    assert counted[0] == counted[2] > counted[1] > 0
