"""What of a prompt is padding: by the pad token, by attention_mask, and where the pad token also stops."""

import numpy as np
import pytest
import torch

import tfm_kernels as tfk
from tests.patching.models import transformers

V, END, NEW = 43, 2, 5


def gpt2():
    """Padding is what ends a text, as GPT-2's users have it."""
    hf = transformers()
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "n_positions": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.4}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=END, eos_token_id=END, pad_token_id=END)).eval()


def own():
    torch.manual_seed(0)
    config = tfk.models.CausalLanguageConfig(V, 40, d_model=16, nhead=2, pad_id=0)
    return tfk.models.CausalLanguageModel(config).eval()


TURNS = torch.tensor([[7, 8, END, 9, 10, END, 11, 12], [7, END, END, 13, 14, 15, 16, 17]])


@pytest.mark.parametrize("patched", [False, True])
def test_ends_of_turns_are_part_of_a_prompt(patched):
    model = gpt2()
    expected = model.generate(TURNS, attention_mask=torch.ones_like(TURNS), max_new_tokens=NEW, do_sample=False)
    if patched:
        tfk.patch(model)
    found = tfk.generate(model, TURNS, NEW)
    assert torch.equal(found[:, : TURNS.shape[1]], TURNS)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_they_are_padding_at_the_ends_of_a_row(side):
    model = gpt2()
    short = TURNS[0, :6]
    padded = torch.full((3, 8), END)
    padded[0], padded[1, :5] = TURNS[1], short[:5]
    if side == "left":
        padded[1] = padded[1].roll(3)
    found = tfk.generate(model, padded, NEW)  # the last row has nothing else: its last is where a text begins
    for row, prompt in zip(found, (TURNS[1], short[:5], torch.tensor([END])), strict=True):
        alone = tfk.generate(model, prompt[None], NEW)[0]
        assert torch.equal(row[: len(alone)], alone) and (row[len(alone) :] == END).all()


def test_the_mask_says_what_is_no_padding():
    """A text that begins with the token that also pads, beside a padded one that does."""
    model = gpt2()
    ids = torch.tensor([[END, 7, 8, 9, END], [END, END, END, 7, 8]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    for given in (mask, mask.bool()):
        found = tfk.generate(model, ids, NEW, attention_mask=given)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1, : 3 + NEW], expected[1, 2:])


def test_our_models_take_a_mask():
    model, ids = own(), torch.tensor([[5, 6, 7, 8], [9, 9, 5, 6]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    found = tfk.generate(model, ids, NEW, attention_mask=mask)
    assert torch.equal(found[1, : 2 + NEW], tfk.generate(model, ids[1:, 2:], NEW)[0])
    assert torch.equal(found[0], tfk.generate(model, ids[:1], NEW)[0])
    assert torch.equal(found, tfk.generate(model, ids.masked_fill(mask == 0, 0), NEW))  # as the pad token has it


@pytest.mark.parametrize("beams", [1, 2])
def test_what_a_mask_hides_does_not_come_back(beams):
    """Behind a row that ended; and no column is kept for what the longest prompt did not need."""
    model, ids, mask = own(), torch.tensor([[5, 6, 9, 9], [1, 2, 3, 4]]), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    free = tfk.generate(model, ids, NEW, attention_mask=mask)
    for stop in (int(free[0, 2]), int(free[1, 4])):
        told = {"eos_id": stop, "num_beams": beams}
        alone = [tfk.generate(model, prompt, NEW, **told)[0] for prompt in (ids[:1, :2], ids[1:])]
        new = [len(row) - given for row, given in zip(alone, (2, 4), strict=True)]
        assert 1 == min(new) < max(new)
        expected = torch.nn.utils.rnn.pad_sequence(alone, batch_first=True)
        assert torch.equal(tfk.generate(model, ids, NEW, attention_mask=mask, **told), expected)


@pytest.mark.parametrize("mask", [None, torch.ones(2, 8, dtype=torch.bool)], ids=["by token", "by mask"])
def test_our_models_hide_their_pad_token_wherever_it_stands(mask):
    """Its own forward does, so that a cache must not see it either; also where it stops."""
    model, ids = own(), TURNS.masked_fill(TURNS == END, 0)
    expected = tfk.generate(model, ids, NEW, attention_mask=mask, eos_id=0, use_cache=False)
    assert torch.equal(tfk.generate(model, ids, NEW, attention_mask=mask, eos_id=0), expected)
    assert expected[0, 6] == model(ids)[0, -1].argmax()
    with pytest.raises(ValueError, match="got nothing but padding in row 1"):
        tfk.generate(model, torch.tensor([[3, 4], [0, 0]]), NEW, eos_id=0)


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("pad", [-1, V])
@pytest.mark.parametrize("stops", [[50256, -1], None])
def test_numbers_of_a_configuration_that_name_nothing(stops, pad, beams):
    """Padding of -1 is the last token's index, a stop beyond the vocabulary nothing's, and -1 positions no limit."""
    model, ids = gpt2(), TURNS[:1]
    model.lm_head = torch.nn.Linear(32, V)
    model.lm_head.bias.data[V - 1] = 1e3
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = pad, stops
    model.config.max_position_embeddings = -1
    assert tfk.generate(model, ids, NEW, num_beams=beams).tolist() == [ids[0].tolist() + [V - 1] * NEW]


def test_padding_that_the_generation_config_does_not_name_is_the_configs():
    model = gpt2()
    model.generation_config.pad_token_id, model.config.pad_token_id = None, 0
    found = tfk.generate(model, torch.tensor([[0, 0, 5, 6]]), NEW)
    assert torch.equal(found, tfk.generate(model, torch.tensor([[5, 6]]), NEW))


def test_texts_longer_than_the_positions_are_refused():
    model = gpt2()
    words = "must fit into config.max_position_embeddings 40, got 41 positions"
    with pytest.raises(ValueError, match=f"^generate: the longest prompt and max_new_tokens - 1 {words}$"):
        tfk.generate(model, TURNS, 34)
    assert tfk.generate(model, TURNS, 33, eos_id=[]).shape == (2, 41)


@pytest.mark.parametrize("kind", [np.int64, torch.tensor, lambda number: [np.int64(number)]])
def test_integers_of_other_kinds(kind):
    """Of configurations, and of masks."""
    model, ids = gpt2(), TURNS[:1, :4]
    whole = torch.ones_like(ids)
    stop = int(tfk.generate(model, ids, 2, attention_mask=whole, eos_id=[])[0, -1])
    expected = tfk.generate(model, ids, NEW, attention_mask=whole, eos_id=stop)
    assert expected.shape[1] < 4 + NEW
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = kind(stop), np.int64(END)
    assert torch.equal(tfk.generate(model, ids, NEW, attention_mask=whole.to(torch.uint16)), expected)


def test_a_source_takes_a_mask():
    hf = transformers()
    torch.manual_seed(0)
    sizes = {"d_model": 16, "num_layers": 1, "d_ff": 32, "num_heads": 2, "d_kv": 8, "vocab_size": V}
    model = hf.T5ForConditionalGeneration(hf.T5Config(**sizes, pad_token_id=0, decoder_start_token_id=0)).eval()
    ids, mask = torch.randint(3, V, (2, 6)), torch.ones(2, 6, dtype=torch.int64)
    mask[1, 4:] = 0
    options = {"max_new_tokens": NEW, "do_sample": False, "suppress_tokens": [0]}  # padding, which tfk never generates
    found = tfk.generate(model, ids, NEW, attention_mask=mask, eos_id=[])
    assert torch.equal(found, model.generate(ids, attention_mask=mask, eos_token_id=None, **options))
    assert torch.equal(found, tfk.generate(model, ids.masked_fill(mask == 0, 0), NEW, eos_id=[]))


def test_scores_are_of_the_last_token_alone():
    """Those of a whole prompt would be its length times as large as what is read."""
    model, sizes = gpt2(), []
    model.lm_head.register_forward_hook(lambda module, given, scores: sizes.append(scores.shape[1]))
    for use_cache in (True, False):
        tfk.generate(model, TURNS, 3, eos_id=[], use_cache=use_cache)
    assert set(sizes) == {1}


@pytest.mark.parametrize(
    "mask, error, message",
    [
        (torch.ones(2, 3), ValueError, r"attention_mask must have shape \(2, 8\) to match ids \(2, 8\), got \(2, 3\)"),
        (torch.ones(2, 8), TypeError, "attention_mask must be bool or of integers, got float32"),
        (-torch.ones(2, 8).long(), ValueError, "attention_mask must be 0 where padding is, else 1, got -1"),
        ([[1]], TypeError, "attention_mask must be a tensor or None, got list"),
        (torch.zeros(2, 8).long(), ValueError, "ids must have a token in every row, got nothing but padding in row 0"),
    ],
)
def test_masks_that_are_none(mask, error, message):
    with pytest.raises(error, match=f"generate: {message}"):
        tfk.generate(own(), TURNS, 1, attention_mask=mask)


def test_translation_models_have_their_own_padding():
    config = tfk.models.TranslationConfig(V, V, d_model=16, nhead=2, num_encoder_layers=1, num_decoder_layers=1)
    with pytest.raises(ValueError, match="attention_mask must be None for a TranslationTransformer"):
        tfk.generate(tfk.models.TranslationTransformer(config), TURNS, 1, bos_id=1, attention_mask=TURNS)
