"""patch() on DeBERTa-v2: what disentangled attention adds to tests of encoders with positions in their attention."""

import copy

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from tests.patching.models import assert_dropout_proven, assert_same_results, deberta, results, transformers
from tfm_kernels.patching import deberta_attention, swap

LAYER = "encoder.layer.0"
LENGTHS = torch.tensor([17, 1, 9, 12])
IDS = torch.randint(3, 99, (4, 17), generator=torch.Generator().manual_seed(0))
RIGHT = (torch.arange(17) < LENGTHS[:, None]).long()
MASKS = {"right": RIGHT, "left": RIGHT.flip(1), "between": RIGHT * (torch.arange(17) != 5).long(), "none": None}
KINDS = {
    "both": {},
    "c2p": {"pos_att_type": "c2p"},
    "p2c": {"pos_att_type": "p2c"},
    "p2c, weights of their own": {"pos_att_type": "p2c", "share_att_key": False},
    "both, weights of their own": {"share_att_key": False},
    "no buckets": {"position_buckets": -1, "max_relative_positions": 64},
    "few distances": {"position_buckets": -1, "max_relative_positions": 4},
    "distances that nothing asks for": {"pos_att_type": ""},
    "no distances": {"relative_attention": False, "pos_att_type": None},
    "table as it is": {"norm_rel_ebd": "none"},
    "narrow embeddings": {"embedding_size": 16, "position_biased_input": False, "type_vocab_size": 0},
}


@pytest.fixture(params=["at once", "row by row"])
def pieces(request, monkeypatch):
    """Batches this small would be taken at once."""
    if request.param == "row by row":
        monkeypatch.setattr(deberta_attention, "_CACHED", 0)


def run_on(mask=RIGHT, **more):
    return lambda m: m(IDS, attention_mask=mask, **more).last_hidden_state


def notes(report):
    return {entry.name: entry.note for entry in report.entries}


def test_layer_and_model_are_fused():
    with tfk.patch(deberta()) as report:
        told = notes(report)
        assert {"", *(f"encoder.layer.{i}" for i in range(3))} <= {entry.name for entry in report.replaced}
    assert told[""] == "padded batches run packed; padded positions give 0" and "attention" in told[LAYER]
    for inner in ("attention.self.query_proj", "attention.output.dense", "intermediate", "output.dense"):
        assert told[f"{LAYER}.{inner}"] == f"runs inside {LAYER}"


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_scores(kind, pieces):
    model = deberta(**KINDS[kind])
    assert_same_results(model, run_on(), RIGHT.bool())
    assert_same_results(model, run_on(), packed=False)
    with tfk.patch(model) as report:
        assert not run_on()(model)[RIGHT == 0].any() and report.fallbacks == {}


@pytest.mark.parametrize("padding", MASKS)
def test_a_padded_run_gives_what_it_gave_at_padding_too(padding, pieces):
    """Where a query is padding, all keys are hidden, and its weights alike; nothing comes back by its scores."""
    assert_same_results(deberta(), run_on(MASKS[padding]), packed=False)


def test_scores_are_divided_by_a_number_of_float32():
    """In float64 too, by transformers' own code; here scores are so large that it shows."""
    model = deberta().double()
    for layer in model.encoder.layer:
        layer.attention.self.query_proj.weight.data.mul_(30)
    stock = run_on()(model)
    with tfk.patch(model, backend="reference"):
        torch.testing.assert_close(run_on()(model)[RIGHT.bool()], stock[RIGHT.bool()], rtol=0, atol=1e-11)


@pytest.mark.parametrize("backend", ["cpu", "aten", "reference"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_dtype_hides_padding(dtype, backend, pieces):
    model = deberta().to(dtype)
    exact = run_on()(copy.deepcopy(model).double())
    with torch.no_grad():
        stock = run_on()(model)
        for packed in (False, True):
            with tfk.patch(model, packed=packed, backend=backend) as report:
                given, met = run_on()(model), report.fallbacks
            live = RIGHT.bool() if packed else torch.ones_like(RIGHT).bool()
            assert met == {} and given.dtype == dtype
            assert (given - exact)[live].norm() <= 1.5 * (stock - exact)[live].norm() + 1e-6


def test_a_mask_of_pairs():
    """Of the encoder called by itself: each row of scores hides others, and one hides all."""
    encoder = deberta().encoder
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(2))
    seen = torch.ones(2, 5, 5).tril()
    seen[1, 2] = 0
    assert_same_results(encoder, lambda m: m(x.to(m.layer[0].output.dense.weight), seen).last_hidden_state)


@pytest.mark.parametrize("shape", [(2, 1, 1, 5), (1, 1, 5, 5), (2, 4, 5, 5), (5, 5)])
def test_a_layer_by_itself_under_masks_of_other_shapes(shape, pieces):
    encoder = deberta().encoder
    generator = torch.Generator().manual_seed(2)
    x, seen = torch.randn(2, 5, 32, generator=generator), torch.rand(shape, generator=generator) < 0.6
    told = {"relative_pos": encoder.get_rel_pos(x), "rel_embeddings": encoder.get_rel_embedding()}
    stock = encoder.layer[0](x, seen, **told)[0]
    with tfk.patch(encoder) as report:
        torch.testing.assert_close(encoder.layer[0](x, seen, **told)[0], stock)
        assert report.fallbacks == ({} if len(shape) == 4 else {"layer.0": {"its mask has not four axes": 1}})


@pytest.mark.parametrize("place", ["encoder", "encoder.layer.1"])
def test_who_watches_what_runs_packed_sees_padded_batches(place):
    model, seen = deberta(), []
    with tfk.patch(model) as report:
        handle = model.get_submodule(place).register_forward_hook(lambda *a: seen.append(a[2][0].shape))
        run_on()(model)
        assert seen == [(4, 17, 32)] and "has hooks" in str(report.fallbacks[""])
        handle.remove()
        assert not run_on()(model)[RIGHT == 0].any() and len(seen) == 1


def test_distances_of_each_rows_own_run_the_original():
    encoder, x, seen = deberta().encoder, torch.randn(2, 5, 32), torch.ones(2, 5)
    places = torch.randint(-4, 5, (2, 5, 5))
    reason = "it was not called with one relative_pos for all rows"
    with tfk.patch(encoder) as report:
        with pytest.raises(RuntimeError):  # which its own code cannot do either
            encoder(x, seen, relative_pos=places)
        assert report.fallbacks["layer.0"] == {reason: 1}
        given = encoder(x, seen, relative_pos=places[:1]).last_hidden_state
    torch.testing.assert_close(given, encoder(x, seen, relative_pos=places[:1]).last_hidden_state)


def test_states_of_its_own_as_queries_run_the_original():
    encoder, x, seen = deberta().encoder, torch.randn(2, 5, 32), torch.ones(2, 5)
    stock = encoder(x, seen, query_states=x.flip(1)).last_hidden_state
    with tfk.patch(encoder) as report:
        torch.testing.assert_close(encoder(x, seen, query_states=x.flip(1)).last_hidden_state, stock)
        assert report.fallbacks["layer.0"] == {"it was called with query_states": 1}


COLLECTS = "output_hidden_states or output_attentions was asked for"


@pytest.mark.parametrize("asked", ["output_hidden_states", "output_attentions"])
def test_what_else_is_asked_for(asked):
    """By the call or by the config; weights are the layers' own code's."""
    told = {"attention_mask": RIGHT, asked: True}
    for more, model in ((told, deberta()), ({"attention_mask": RIGHT}, deberta(**{asked: True}))):
        stock = model(IDS, **more)
        with tfk.patch(model) as report:
            given = model(IDS, **more)
            assert report.fallbacks[""] == {COLLECTS: 1}
            weights = {"output_attentions was asked for": 1} if asked == "output_attentions" else None
            assert report.fallbacks.get(LAYER) == weights
        for name, count in (("hidden_states", 4), ("attentions", 3)):
            if name in asked:
                assert len(given[name]) == count
                torch.testing.assert_close(given[name], stock[name])
        torch.testing.assert_close(given.last_hidden_state, stock.last_hidden_state)


def test_a_convolution_runs_padded():
    model = deberta(conv_kernel_size=3)
    assert_same_results(model, run_on())
    with tfk.patch(model) as report:
        assert notes(report)[""] == "because its encoder has a convolution over neighbouring positions"
        assert swap.is_fused(model.encoder.layer[0])


def test_steps_behind_the_last_layer_run_the_original():
    model = deberta()
    with tfk.patch(model) as report:
        model.z_steps = 2
        with pytest.raises(AttributeError):  # so it does in transformers 5.24
            run_on()(model)
        assert report.fallbacks[""] == {"its last layer runs z_steps times": 1}


def test_heads_read_what_they_read():
    hf, spans = transformers(), torch.tensor([1, 0, 0, 3])
    heads = {
        "MaskedLM": {"labels": IDS.masked_fill(RIGHT == 0, -100)},
        "TokenClassification": {"labels": (IDS % 2).masked_fill(RIGHT == 0, -100)},
        "SequenceClassification": {"labels": torch.tensor([0, 1, 0, 1])},
        "QuestionAnswering": {"start_positions": spans, "end_positions": spans},
    }
    for name, more in heads.items():
        torch.manual_seed(0)
        model = getattr(hf, f"DebertaV2For{name}")(deberta().config).eval()
        assert_same_results(model, lambda m, more=more: m(IDS, attention_mask=RIGHT, **more).loss)
        with tfk.patch(model) as report:
            reads = "because its model's head reads all positions, padding too"
            assert (notes(report)["deberta"] == reads) == ("Question" in name)
            assert swap.is_fused(model.deberta) == ("Question" not in name)


def test_rows_of_choices():
    hf = transformers()
    torch.manual_seed(0)
    model = hf.DebertaV2ForMultipleChoice(deberta().config).eval()
    told = {"input_ids": IDS.view(2, 2, 17), "attention_mask": RIGHT.view(2, 2, 17), "labels": torch.tensor([0, 1])}
    assert_same_results(model, lambda m: m(**told).loss)


@pytest.mark.parametrize("name", ["hidden_dropout_prob", "attention_probs_dropout_prob"])
def test_each_dropout_is_dropped_where_it_was(name):
    model = deberta(**{name: 0.3})
    inputs = {"input_ids": IDS, "attention_mask": RIGHT}
    assert_dropout_proven(model, inputs, lambda out: out.last_hidden_state[RIGHT.bool()])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_proven_in_16_bits(training, padded):
    model = deberta(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1).train(training)
    inputs = {"input_ids": IDS, "attention_mask": RIGHT if padded else torch.ones_like(IDS)}
    report = tfk.prove(model, inputs, dtype=torch.bfloat16, steps=1)
    assert report.passed, report.table()
    assert not any("original code" in note for note in report.notes), report.notes


def test_gradient_checkpointing(pieces):
    model = deberta().train()
    stock = results(model, run_on(), RIGHT.bool())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with tfk.patch(model) as report:
        torch.testing.assert_close(results(model, run_on(), RIGHT.bool()), stock, rtol=1e-4, atol=1e-4)
        assert report.fallbacks == {} and not run_on()(model)[RIGHT == 0].any()


@pytest.mark.parametrize("packed", [False, True])
def test_autocast(packed):
    model = deberta()
    exact = run_on()(model.double()).detach()[RIGHT.bool()]
    model.float()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        stock = run_on()(model)[RIGHT.bool()]
        with tfk.patch(model, packed=packed) as report:
            given = run_on()(model)[RIGHT.bool()]
            assert report.fallbacks == {}
    assert given.dtype == stock.dtype
    assert (given - exact).norm() <= 1.5 * (stock - exact).norm()


def test_frozen():
    model = deberta()
    with torch.no_grad():
        stock = run_on()(model)
        with tfk.patch(model, freeze=True) as report:
            torch.testing.assert_close(run_on()(model)[RIGHT.bool()], stock[RIGHT.bool()])
            assert report.fallbacks == {}


def test_changed_code_is_left_as_it_is():
    """A subclass with its own forward: of a layer, of its attention, of the encoder."""
    own = transformers().models.deberta_v2.modeling_deberta_v2

    class Layer(own.DebertaV2Layer):
        def forward(self, *args, **kwargs):
            y, weights = super().forward(*args, **kwargs)
            return y * 2, weights

    class Attention(own.DisentangledSelfAttention):
        def disentangled_attention_bias(self, *args, **kwargs):
            return super().disentangled_attention_bias(*args, **kwargs) * 2

    class Encoder(own.DebertaV2Encoder):
        def get_rel_pos(self, *args, **kwargs):
            return super().get_rel_pos(*args, **kwargs) * 2

    for cls, place in ((Layer, LAYER), (Attention, f"{LAYER}.attention.self"), (Encoder, "encoder")):
        for later in (False, True):
            model, changed = deberta(), deberta()
            changed.get_submodule(place).__class__ = cls
            stock = run_on()(changed)
            assert not torch.allclose(stock, run_on()(model))
            tfk.patch(model)
            if later:
                model.get_submodule(place).__class__ = cls
            else:
                model = changed
                tfk.patch(model)
            torch.testing.assert_close(run_on()(model), stock)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("name", ["query_proj", "key_proj", "pos_key_proj"])
def test_an_adapter_in_attention(name):
    """In place of a projection whose weights the fused code reads, or of one that it calls."""
    model = deberta(share_att_key=False)
    attention = model.get_submodule(f"{LAYER}.attention.self")
    adapter = Doubled(32, 32)
    adapter.load_state_dict(getattr(attention, name).state_dict())
    setattr(attention, name, adapter)
    stock = run_on()(model)
    with tfk.patch(model) as report:
        given = run_on()(model)
        torch.testing.assert_close(given[RIGHT.bool()], stock[RIGHT.bool()])
        assert bool(given[RIGHT == 0].any()) is (name != "pos_key_proj")
        if name != "pos_key_proj":
            assert f"{name} is Doubled" in str(report)


def test_a_failed_patch_leaves_it_as_it_was_patched():
    model = nn.ModuleDict({"text": deberta(), "odd": nn.Linear(2, 2)})
    stock = run_on()(model["text"])

    def fails(module):
        if type(module) is nn.Linear and module.in_features == 2:
            raise RuntimeError("no")
        return False

    tfk.patching.register_recipe(tfk.patching.Recipe("test.fails", fails, lambda c: c, ""))
    try:
        with pytest.raises(RuntimeError, match="no"):
            tfk.patch(model)
        assert not swap.is_fused(model["text"]) and torch.equal(run_on()(model["text"]), stock)
        tfk.patch(model["text"])
        packed = run_on()(model["text"])
        with pytest.raises(RuntimeError, match="no"):
            tfk.patch(model, packed=False)
        assert torch.equal(run_on()(model["text"]), packed) and not packed[RIGHT == 0].any()
    finally:
        tfk.patching.register_recipe(tfk.patching.Recipe("test.fails", lambda m: False, lambda c: c, ""))
    assert tfk.unpatch(model) and torch.equal(run_on()(model["text"]), stock)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_as_one_graph(backend):
    model = deberta()
    stock = results(model, run_on(), RIGHT.bool())
    with tfk.patch(model) as report:
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        given = results(model, lambda m: run_on()(compiled), RIGHT.bool())
        assert report.fallbacks == {}
    torch._dynamo.reset()
    torch.testing.assert_close(given, stock, rtol=1e-4, atol=1e-5)


def test_a_batch_of_no_rows_and_rows_of_no_tokens():
    model = deberta()
    with tfk.patch(model):
        for shape in ((0, 5), (2, 0)):
            ids = torch.zeros(shape, dtype=torch.long)
            assert model(ids, attention_mask=ids).last_hidden_state.shape == (*shape, 32)
