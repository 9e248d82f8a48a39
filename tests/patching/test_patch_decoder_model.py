"""patch() on decoder-only models of transformers, packed as a whole: padded batches, and sequences in rows."""

import copy
import pickle
import sys
from contextlib import contextmanager

import pytest
import torch

import tfm_kernels as tfk
from tests.patching.models import (
    SUMMED_IN_FLOAT32,
    assert_as_exact_as_before,
    assert_compiles,
    assert_same_results,
    compare,
    decoder,
    results,
    transformers,
)
from tfm_kernels.patching import packed, swap

WINDOW = dict(sliding_window=4, layer_types=["sliding_attention", "full_attention"])
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "ministral": WINDOW,
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": {},
    "smollm3": {},
    "phi3": {"sliding_window": 4},
    "gemma": {},
    "gemma3_text": WINDOW,
    "granite": {},
    "glm": {},
    "glm4": {},
    "ernie4_5": {},
    "olmo": {},
    "helium": {},
}
IN_FLOAT64 = "in float64 its own code takes the variance in float32"
LENGTHS = torch.tensor([9, 3, 6, 1])
IDS = torch.randint(3, 99, (4, 9), generator=torch.Generator().manual_seed(0))
BEHIND = (torch.arange(9) < LENGTHS[:, None]).long()
MASKS = {"behind": BEHIND, "in front": BEHIND.flip(1)}
PLACES = torch.cat([torch.arange(n) for n in LENGTHS.tolist()]).expand(2, -1)
ROWS = torch.randint(3, 99, (2, 19), generator=torch.Generator().manual_seed(1))


def build(family, head=False, **changes):
    model = decoder(family, **{**FAMILIES[family], **changes})
    return model if head else model.model


def padded(mask=BEHIND, **more):
    return lambda m: m(input_ids=IDS, attention_mask=mask, **more)[0]


def in_rows(**more):
    return lambda m: m(input_ids=ROWS, position_ids=PLACES, **{"use_cache": False, **more})[0]


@contextmanager
def packings():
    """What runs packed within the block."""
    seen = []
    watch = lambda stack, how: seen.append(how)
    packed.WATCHERS.append(watch)
    try:
        yield seen
    finally:
        packed.WATCHERS.remove(watch)


def assert_same(model, run, mask=None, packs=True, **options):
    """As assert_same_results; and it runs packed, or does not, each time: in float64, in float32."""
    select, wide = None if mask is None else mask.bool(), model.config.model_type not in SUMMED_IN_FLOAT32
    with packings() as seen:
        if wide:
            assert_same_results(model, run, select, double_fallbacks=IN_FLOAT64, **options)
        else:
            exact = results(copy.deepcopy(model).double(), run, select)
            assert_as_exact_as_before(model, run, exact, select, **options)
    assert len(seen) == (1 + wide) * packs


@pytest.mark.parametrize("where", MASKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_batch(family, where):
    mask = MASKS[where]
    assert_same(build(family), padded(mask), mask)
    model = build(family)
    with tfk.patch(model, backend="cpu"):
        assert not padded(mask)(model)[mask == 0].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_in_rows(family):
    """As collators without padding lay them; transformers tells them apart by their positions."""
    model = build(family)
    apart = torch.cat([model(r[None]).last_hidden_state for r in ROWS[0].split(LENGTHS.tolist())], dim=1)
    torch.testing.assert_close(in_rows()(model)[:1], apart)
    assert_same(model, in_rows())


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_batch_that_is_not_padded_and_padded_ones_that_are_not_packed(family):
    assert_same(build(family), padded(torch.ones_like(IDS)), packs=False)
    assert_same(build(family), padded(), BEHIND, packs=False, packed=False)
    assert_same(build(family), in_rows(), packs=False, packed=False)


def test_rows_without_tokens():
    mask = BEHIND * torch.tensor([1, 0, 1, 0])[:, None]
    assert_same(build("qwen3"), padded(mask), mask)


def test_positions_and_embeddings_of_ones_own():
    embeds = torch.randn(4, 9, 32, generator=torch.Generator().manual_seed(2))
    mask, places = MASKS["in front"], (MASKS["in front"].cumsum(1) - 1).clamp(min=0)
    run = lambda m: m(inputs_embeds=embeds.to(m.dtype), attention_mask=mask, position_ids=places).last_hidden_state
    assert_same(build("qwen3"), run, mask)


REFUSED = {
    "between": (dict(attention_mask=BEHIND * (torch.arange(9) != 1)), "padding stands between its tokens"),
    "no tokens": (dict(attention_mask=torch.zeros_like(BEHIND)), "there are no tokens"),
    "hidden states": (dict(output_hidden_states=True), "output_hidden_states or output_attentions was asked for"),
    "more": (dict(is_causal=True), "it was called with more than tokens and their padding"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_calls_that_run_padded(case):
    model, (more, reason) = build("llama"), REFUSED[case]
    told = {"input_ids": IDS, "attention_mask": BEHIND, **more}
    stock, keep = model(**told), told["attention_mask"].bool()
    with tfk.patch(model) as report:
        given = model(**told)
        assert report.fallbacks == {"": {reason: 1}}
    torch.testing.assert_close(given[0][keep], stock[0][keep])


def test_rows_that_are_one_sequence_for_the_model():
    """Where it fills a cache, is told a mask or sees both ways, transformers does not look at positions."""
    both_ways = build("llama")
    both_ways.config.is_causal = False
    for model, run in (
        (build("llama"), in_rows(use_cache=True)),
        (build("llama"), in_rows(attention_mask=torch.ones_like(ROWS))),
        (both_ways, in_rows()),
    ):
        assert_same(model, run, packs=False)


def test_a_checkpointed_model_fills_no_cache():
    """Though its config asks for one, so that rows are looked at for sequences."""
    model = build("llama").train()
    model.gradient_checkpointing_enable()
    assert_same(model, in_rows(use_cache=None))
    assert_same(model, padded(), BEHIND)


def test_rows_of_a_collator_that_flattens():
    hf = transformers()
    collate = hf.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt")
    batch = collate([{"input_ids": row[:n]} for row, n in zip(IDS.tolist(), LENGTHS.tolist(), strict=True)])
    model = build("qwen2", head=True)
    assert_same(model, lambda m: m(**batch, use_cache=False).loss)


@pytest.mark.parametrize("where", MASKS)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_a_packed_prompt_fills_the_cache_as_it_lies_padded(family, where):
    """Also one that the user made; the tokens that follow are given what they had."""
    hf, mask, more = transformers(), MASKS[where], torch.tensor([[5], [6], [7], [8]])
    model = build(family, head=True)
    longer = torch.cat([mask, torch.ones(4, 1, dtype=torch.long)], 1)

    def run(m, cache, name="cache"):
        out = m(IDS, attention_mask=mask, use_cache=True, **{name: cache})
        keys = [layer.keys.clone() for layer in out.past_key_values.layers]
        places = longer.sum(1, keepdim=True) - 1
        return keys, m(more, attention_mask=longer, past_key_values=out.past_key_values, position_ids=places).logits

    stock = run(model, None)
    with tfk.patch(model) as report, packings() as seen:
        made = [hf.DynamicCache(config=model.config) for _ in range(2)]
        for cache, name in ((None, "cache"), (made[0], "cache"), (made[1], "past_key_values")):
            keys, logits = run(model, cache, name)
            for mine, theirs in zip(keys, stock[0], strict=True):
                kept = mask[:, -mine.shape[2] :].bool()
                torch.testing.assert_close(mine.transpose(1, 2)[kept], theirs.transpose(1, 2)[kept])
            torch.testing.assert_close(logits, stock[1])
        assert len(seen) == 3 and report.fallbacks == {} and {cache.get_seq_length() for cache in made} == {10}


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_that_the_model_itself_is_given_is_filled(name):
    """Without a head above, which hands it on by its newer name."""
    hf, model = transformers(), build("llama")
    stock, mine = hf.DynamicCache(config=model.config), hf.DynamicCache(config=model.config)
    model(IDS, attention_mask=BEHIND, use_cache=False, **{name: stock})
    with tfk.patch(model), packings() as seen:
        out = model(IDS, attention_mask=BEHIND, use_cache=False, **{name: mine})
        assert len(seen) == 1 and out.past_key_values is mine
    for given, wanted in zip(mine.layers, stock.layers, strict=True):
        torch.testing.assert_close(
            given.keys.transpose(1, 2)[BEHIND.bool()], wanted.keys.transpose(1, 2)[BEHIND.bool()]
        )


def test_a_mask_that_no_packing_knows_runs_padded():
    """Chunks of 4 tokens, each of which attends within itself."""
    model = build("mistral", attention_chunk_size=4)
    stock = model(IDS, attention_mask=BEHIND).last_hidden_state[BEHIND.bool()]
    with tfk.patch(model) as report:
        compare({"": model(IDS, attention_mask=BEHIND).last_hidden_state[BEHIND.bool()]}, {"": stock}, 1e-5)
        assert "its model made a mask that is neither causal nor a window" in sum(
            map(list, report.fallbacks.values()), []
        )


def test_a_cache_that_holds_tokens_or_does_not_grow_runs_padded():
    hf, model = transformers(), build("llama", head=True)
    held = hf.DynamicCache(config=model.config)
    with torch.no_grad():
        model(IDS, past_key_values=held, use_cache=True)
    mask = torch.cat([torch.ones_like(IDS), BEHIND], 1)
    stock = model(IDS, attention_mask=mask, past_key_values=copy.deepcopy(held)).logits[BEHIND.bool()]
    fixed = lambda: hf.StaticCache(config=model.config, max_cache_len=12)
    other = model(IDS, attention_mask=BEHIND, past_key_values=fixed()).logits[BEHIND.bool()]
    with tfk.patch(model) as report, packings() as seen:
        given = model(IDS, attention_mask=mask, past_key_values=held).logits[BEHIND.bool()]
        torch.testing.assert_close(given, stock)
        given = model(IDS, attention_mask=BEHIND, past_key_values=fixed()).logits[BEHIND.bool()]
        torch.testing.assert_close(given, other)
        assert not seen and report.fallbacks == {"model": {"it was called with a cache": 1}}


def test_generated_tokens_of_padded_prompts_are_the_stock_models():
    model = build("qwen3", head=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(
                4 if parameter.dim() > 1 else 1
            )  # so that a token follows from the others, not from rounding
    mask = MASKS["in front"]
    told = dict(attention_mask=mask, do_sample=False, max_new_tokens=6, pad_token_id=0, eos_token_id=None)
    stock = model.generate(IDS, **told)
    with tfk.patch(model), packings() as seen:
        assert torch.equal(model.generate(IDS, **told), stock) and len(seen) == 1


def test_embeddings_that_see_both_ways():
    """As EmbeddingGemma's, whose windows reach to both sides."""
    assert_same(build("gemma3_text", use_bidirectional_attention=True), padded(), BEHIND)


def test_packed_dropout_is_the_padded_one():
    model = build("llama", attention_dropout=0.3).double().train()

    def run(m):
        torch.manual_seed(3)
        return padded()(m)

    got = {}
    for packs in (False, True):
        with tfk.patch(model, packed=packs, backend="reference"), packings() as seen:
            got[packs] = results(model, run, BEHIND.bool())
            assert len(seen) == packs
    compare(got[True], got[False], 1e-10)
    assert not torch.equal(got[True]["output"], results(copy.deepcopy(model).eval(), run, BEHIND.bool())["output"])


@pytest.mark.parametrize("run", [in_rows(), padded(MASKS["in front"])])
def test_attention_that_would_drop_other_elements_runs_as_it_lies(run):
    model = build("llama", attention_dropout=0.3)
    for training in (True, False):
        with tfk.patch(model.train(training)) as report, packings() as seen:
            run(model)
            reason = {"": {"layer 0 cannot run packed: its dropout would count other rows": 1}}
            assert (report.fallbacks, len(seen)) == ((reason, 0) if training else ({}, 1))


def test_a_layers_dropout_would_count_other_rows():
    model = build("phi3", resid_pdrop=0.3).train()
    with tfk.patch(model) as report:
        padded()(model)
        assert report.fallbacks == {"": {"layer 0 cannot run packed: its dropout would count other rows": 1}}


def test_positions_that_depend_on_the_length_run_padded():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with tfk.patch(model := build("llama", rope_parameters=rope)) as report:
        padded()(model)
        assert report.fallbacks == {"": {"its rotary positions depend on the length of the batch": 1}}


@pytest.mark.parametrize("where", MASKS)
@pytest.mark.parametrize("train", [False, True])
def test_proven(train, where):
    model = build("qwen3", head=True).train(train)
    report = tfk.prove(model, {"input_ids": IDS, "attention_mask": MASKS[where], "use_cache": False})
    assert report.passed, report.table()
    assert any("17 of 36 positions are padding" in note for note in report.notes), report.notes


def test_compiled():
    assert_compiles(build("llama"), padded())


def test_given_back_copied_and_patched_again():
    model, run = build("llama", head=True), lambda m: m(IDS, attention_mask=BEHIND).logits
    stock, classes = run(model), [type(m) for m in model.modules()]
    tfk.patch(model)
    given = run(model)
    assert not given[BEHIND == 0].any()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(other), given) and swap.is_fused(other.model)
    tfk.patch(model, packed=False)
    assert run(model)[BEHIND == 0].any()
    tfk.unpatch(model)
    assert [type(m) for m in model.modules()] == classes and torch.equal(run(model), stock)


def by_hand(config, inputs_embeds, attention_mask, **more):
    tokens = inputs_embeds.shape[1]
    return attention_mask[:, None, None, :].bool() & torch.ones(tokens, tokens).bool().tril()


def of_a_prefix(**more):
    from transformers.masking_utils import create_causal_mask

    return create_causal_mask(**more, or_mask_function=lambda row, head, query, key: key < 2)


@pytest.mark.parametrize(
    "maker, reason",
    [(by_hand, "its model reads its mask"), (of_a_prefix, "its model made a mask that is neither causal nor a window")],
)
def test_masks_that_somebody_else_makes_run_padded(maker, reason, monkeypatch):
    model = build("llama")
    monkeypatch.setitem(vars(sys.modules[type(model).__module__]), "create_causal_mask", maker)
    stock = model(IDS, attention_mask=BEHIND)[0][BEHIND.bool()]
    with tfk.patch(model) as report:
        compare({"": model(IDS, attention_mask=BEHIND)[0][BEHIND.bool()]}, {"": stock}, 1e-5)
        assert report.fallbacks[""] == {reason: 1}


def test_one_position_for_all_tokens_of_a_row():
    model, places = build("llama"), torch.arange(4)[:, None]
    stock = model(IDS, position_ids=places)[0]
    with tfk.patch(model):
        compare({"": model(IDS, position_ids=places)[0]}, {"": stock}, 1e-5)
