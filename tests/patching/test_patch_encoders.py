"""patch() on encoders of transformers with positions in their attention, packed as a whole where they are padded."""

import copy
import pickle

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from tests.patching.models import assert_compiles, assert_same_results, compare, results, transformers
from tfm_kernels.mask import Band, Mask
from tfm_kernels.patching import huggingface_mask, swap

SMALL = dict(
    vocab_size=99, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, pad_token_id=0,
    max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
FAMILIES = {
    "ModernBert": dict(local_attention=6, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2),
    "NomicBert": dict(hidden_dropout_prob=0.0),
    "JinaEmbeddingsV3": dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "Gte": dict(hidden_dropout_prob=0.0),
    "EuroBert": dict(num_key_value_heads=2),
    "MPNet": dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "DebertaV2": dict(
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, relative_attention=True, pos_att_type="c2p|p2c",
        position_buckets=8, share_att_key=True, norm_rel_ebd="layer_norm", type_vocab_size=2,
    ),
}  # fmt: skip
LENGTHS = torch.tensor([17, 1, 9, 12])
IDS = torch.randint(3, 99, (4, 17), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(17) < LENGTHS[:, None]).long()


def build(family, head="Model", **changes):
    """A small model of a family, no weight of a norm of which is 1 or 0."""
    hf = transformers()
    torch.manual_seed(0)
    config = getattr(hf, f"{family}Config")(**{**SMALL, **FAMILIES[family], **changes})
    model = getattr(hf, f"{family}{head}")(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.5, 0.2)
    return model.eval()


IN_FLOAT64 = {"EuroBert": "in float64 its own code takes the variance in float32"}  # which is Llama's


def assert_same(family, run, select=None, **options):
    assert_same_results(build(family), run, select, double_fallbacks=IN_FLOAT64.get(family), **options)


def stack_of(model):
    """The module that runs packed: the encoder of MPNet, else the model."""
    return model.encoder if type(model).__name__ == "MPNetModel" else model


def run_on(mask=MASK, **more):
    tokens = {} if "inputs_embeds" in more else {"input_ids": IDS}
    return lambda m: m(**tokens, attention_mask=mask, **more).last_hidden_state


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_batch(family, packed):
    """What stays as it is stays for a reason that is known."""
    assert_same(family, run_on(), MASK.bool(), packed=packed)
    model = build(family)
    with tfk.patch(model, packed=packed, backend="cpu") as report:
        assert packed is not bool(run_on()(model)[MASK == 0].any())
        assert {entry.note for entry in report.kept} <= {
            "because it holds nothing to fuse",
            *(f"because no recipe knows {kind}" for kind in ("Embedding", *_unfused(family))),
            "because its attention does not go through transformers' AttentionInterface",
            "because packed=False was asked for",
        }


def _unfused(family):
    return [f"{family}{part}" for part in ("Embeddings", "RotaryEmbedding", "Pooler", "Encoder")]


@pytest.mark.parametrize("family", FAMILIES)
def test_batch_without_padding(family):
    for mask in (torch.ones_like(IDS), None):
        assert_same(family, run_on(mask))


@pytest.mark.parametrize("family", ["EuroBert", "MPNet", "NomicBert", "DebertaV2"])
def test_packed_dropout_is_the_padded_one(family):
    """Of layers that drop: NomicBERT's embeddings, which would draw others, do not."""
    model = build(family, **{name: 0.3 for name in _drops(family)}).double().train()
    if family == "NomicBert":
        model.embeddings.dropout.p = 0.0

    def run(m):
        torch.manual_seed(3)
        return run_on()(m)

    got = {}
    for packed in (False, True):
        with tfk.patch(model, packed=packed, backend="reference") as report:
            got[packed] = results(model, run, MASK.bool())
            assert {reason for met in report.fallbacks.values() for reason in met} <= {IN_FLOAT64.get(family)}
    compare(got[True], got[False], 1e-10)
    assert not torch.equal(got[True]["output"], results(copy.deepcopy(model).eval(), run, MASK.bool())["output"])


def _drops(family):
    return ("attention_dropout",) if family == "EuroBert" else ("hidden_dropout_prob", "attention_probs_dropout_prob")


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_proven(family, train):
    report = tfk.prove(build(family).train(train), {"input_ids": IDS, "attention_mask": MASK})
    assert report.passed, report.table()
    assert any("29 of 68 positions are padding" in note for note in report.notes), report.notes


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "MPNet"])
def test_what_each_token_has_is_packed_with_it(name):
    """Positions of a row of its own, kinds of tokens, and embeddings in the place of numbers."""
    generator = torch.Generator().manual_seed(1)
    embeds, places = torch.randn(4, 17, 32, generator=generator), torch.randint(0, 60, (4, 17), generator=generator)
    more = {"position_ids": places}
    if name in ("NomicBert", "JinaEmbeddingsV3", "Gte", "DebertaV2"):
        more["token_type_ids"] = torch.randint(0, 2, (4, 17), generator=generator)
    model, run = build(name, type_vocab_size=2), lambda m: run_on(**more, inputs_embeds=embeds.to(m.dtype))(m)
    assert_same_results(model, run, MASK.bool(), double_fallbacks=IN_FLOAT64.get(name))
    with tfk.patch(model):
        assert not run(model)[MASK == 0].any()


def test_a_pooler_is_given_the_first_token_of_each_row():
    model = build("JinaEmbeddingsV3")
    stock = model(IDS, attention_mask=MASK).pooler_output
    with tfk.patch(model):
        torch.testing.assert_close(model(IDS, attention_mask=MASK).pooler_output, stock)


CALLS = {
    "left padding": (dict(attention_mask=MASK.flip(1)), "a row begins with padding"),
    "between": (
        dict(attention_mask=MASK * (torch.arange(17) != 5).long()),
        "padding stands between its tokens",
    ),
    "hidden states": (dict(output_hidden_states=True), "output_hidden_states or output_attentions was asked for"),
    "tuple": (dict(return_dict=False), "its outputs were asked for as a tuple"),
    "more": (dict(temperature=2), "it was called with more than tokens and their padding"),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS)
@pytest.mark.parametrize("family", ["ModernBert", "Gte", "DebertaV2"])
def test_calls_that_run_padded(family, case):
    model, (more, reason) = build(family), CALLS[case]
    told = {"input_ids": IDS, "attention_mask": MASK, **more}
    stock = model(**told)
    with tfk.patch(model) as report:
        given = model(**told)
        assert report.fallbacks[""] == {reason: 1}
    keep = told["attention_mask"].bool()
    torch.testing.assert_close(given[0][keep], stock[0][keep])
    if case == "hidden states":
        assert len(given.hidden_states) == len(stock.hidden_states) == 4


def test_embeddings_that_drop_or_are_watched_run_padded():
    model = build("Gte")
    model.embeddings.dropout.p = 0.5
    with tfk.patch(model.train()) as report:
        run_on()(model)
        assert report.fallbacks == {"": {"its embeddings' dropout would count other rows": 1}}
    model.eval()
    with tfk.patch(model) as report:
        shapes = []
        handle = model.embeddings.register_forward_hook(lambda m, args, out: shapes.append(out.shape))
        run_on()(model)
        handle.remove()
        assert report.fallbacks == {"": {"embeddings has hooks": 1}} and shapes == [(4, 17, 32)]
        assert not run_on()(model)[MASK == 0].any()


def test_dropout_inside_a_feed_forward_block_runs_padded():
    model = build("ModernBert", mlp_dropout=0.1).train()
    with tfk.patch(model) as report:
        run_on()(model)
        assert report.fallbacks == {"": {"layer 0 cannot run packed: its dropout would count other rows": 1}}


class OverTokens(nn.Module):
    """In place of a part that takes rows one by one: a mean over the tokens of each row."""

    def forward(self, x, *args, **kwargs):
        return x + x.mean(1, keepdim=True)


PLACES = {
    ("ModernBert", "layers.1.mlp"): "layer 1 cannot run packed: mlp is OverTokens",
    ("ModernBert", "layers.1.attn_norm"): "layer 1 cannot run packed: attn_norm is OverTokens",
    ("Gte", "layers.0.mlp.act_fn"): "layer 0 cannot run packed: mlp.act_fn is OverTokens",
    ("EuroBert", "layers.2.post_attention_layernorm"): (
        "layer 2 cannot run packed: post_attention_layernorm is OverTokens"
    ),
    ("EuroBert", "norm"): "norm is OverTokens",
    ("NomicBert", "embeddings.LayerNorm"): "embeddings.LayerNorm is OverTokens, not LayerNorm",
    ("DebertaV2", "encoder.layer.1.output.LayerNorm"): (
        "layer 1 cannot run packed: output.LayerNorm is OverTokens, not LayerNorm"
    ),
    ("JinaEmbeddingsV3", "embeddings"): "embeddings is Other, whose forward is not the known one",
}


@pytest.mark.parametrize("family, place", PLACES)
def test_parts_of_ones_own_that_mix_tokens_run_padded(family, place):
    """Put in before patching or after it."""
    model = build(family)
    part = OverTokens()
    if place == "embeddings":
        part = copy.deepcopy(model.embeddings)

        class Other(type(part)):
            def forward(self, **told):
                y = super().forward(**told)
                return y + y.mean(1, keepdim=True)

        part.__class__ = Other
    later = copy.deepcopy(model)
    model.set_submodule(place, part)
    stock = run_on()(model)
    with tfk.patch(later) as report:
        later.set_submodule(place, part)
        torch.testing.assert_close(run_on()(later), stock)
        assert PLACES[family, place] in report.fallbacks[""]
    with tfk.patch(model):
        torch.testing.assert_close(run_on()(model), stock)


def test_positions_that_depend_on_the_length_run_padded():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = build("NomicBert", rope_parameters=rope)
    with tfk.patch(model) as report:
        run_on()(model)
        assert report.fallbacks == {"": {"its rotary positions depend on the length of the batch": 1}}


@pytest.mark.parametrize("family", ["ModernBert", "MPNet", "DebertaV2"])
def test_a_head_that_reads_padding_is_given_what_it_had(family):
    model, spans = build(family, "ForQuestionAnswering"), torch.tensor([1, 0, 0, 3])
    told = {"input_ids": IDS, "attention_mask": MASK, "start_positions": spans, "end_positions": spans}
    stock = model(**told).loss
    with tfk.patch(model) as report:
        torch.testing.assert_close(model(**told).loss, stock)
        assert not report.notes and report.fallbacks == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_given_back_copied_and_patched_again(family):
    model, run = build(family), run_on()
    stock, cls = run(model), type(stack_of(model))
    tfk.patch(model)
    packed = run(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(other), packed) and swap.is_fused(stack_of(other))
    tfk.patch(model)
    assert torch.equal(run(model), packed)
    tfk.patch(model, packed=False)
    assert run(model)[MASK == 0].any()
    tfk.patch(model)
    with pytest.raises(ValueError, match="backend"):
        tfk.patch(model, backend="none such")
    assert torch.equal(run(model), packed)
    tfk.unpatch(model)
    assert type(stack_of(model)) is cls and torch.equal(run(model), stock)
    assert model.config._attn_implementation == build(family).config._attn_implementation


def test_a_patch_that_fails_leaves_a_packed_model_as_it_was():
    model, run = nn.ModuleDict({"text": build("ModernBert"), "odd": nn.Linear(2, 2)}), run_on()
    stock = run(model["text"])

    class Odd(nn.Linear):
        pass

    model["odd"].__class__ = Odd

    def fails(module):
        raise RuntimeError("no")

    first = tfk.patching.Recipe("test.fails", lambda m: fails(m) if type(m) is Odd else False, lambda c: c, "")
    tfk.patching.register_recipe(first)
    try:
        with pytest.raises(RuntimeError, match="no"):
            tfk.patch(model)
        assert not swap.is_fused(model["text"]) and torch.equal(run(model["text"]), stock)
        tfk.patch(model["text"])
        packed = run(model["text"])
        with pytest.raises(RuntimeError, match="no"):
            tfk.patch(model, packed=False)
        assert torch.equal(run(model["text"]), packed)
    finally:
        tfk.patching.register_recipe(tfk.patching.Recipe("test.fails", lambda m: False, lambda c: c, ""))


def test_a_part_whose_attention_cannot_be_ours_is_given_back_its_own():
    """Gemma 4's hearing attends by itself alone: what the whole model is given back is not for it."""
    hf, small = transformers(), dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    text = dict(**small, num_key_value_heads=2, head_dim=8, intermediate_size=48, vocab_size=99)
    torch.manual_seed(0)
    config = hf.Gemma4Config(
        text_config={**text, "vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8},
        audio_config=dict(**small), vision_config=dict(**small, intermediate_size=48, head_dim=8),
    )  # fmt: skip
    model = hf.Gemma4Model(config).eval()
    names = lambda: {m.config._attn_implementation for m in model.modules() if isinstance(m, hf.PreTrainedModel)}
    assert names() == {"sdpa", "eager"}
    tfk.patch(model)
    assert names() == {"tfm_kernels", "eager"}
    tfk.unpatch(model)
    assert names() == {"sdpa", "eager"} and model.audio_tower.config._attn_implementation == "eager"


def test_a_window_reaches_attention_as_a_band():
    """Of the layers that see one; so far keys alone are looked at, and not written out as a matrix."""
    model, seen = build("ModernBert"), []
    function = huggingface_mask.mask

    def watch(**told):
        seen.append(function(**told))
        return seen[-1]

    registered = pytest.importorskip("transformers.masking_utils").AttentionMaskInterface
    with tfk.patch(model, packed=False):
        name = model.config._attn_implementation
        registered.register(name, watch)
        try:
            run_on()(model)
            run_on(None)(model)
        finally:
            registered.register(name, function)
    padded, around, none, alone = seen
    assert type(padded) is type(around) is Mask and padded.keep_matrix.shape == around.keep_matrix.shape == (
        4,
        1,
        1,
        17,
    )
    assert not padded.has_band() and around.top_left == Band(-3, 3) and none is None
    assert alone.top_left == Band(-3, 3) and alone.keep_matrix is None


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled(family):
    assert_compiles(build(family), run_on(torch.ones_like(IDS) if family == "MPNet" else MASK))
