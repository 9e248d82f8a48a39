"""patch() below heads that are told labels: where these count padding, all runs padded, and the loss is what it was."""

import copy
import pickle
import types

import pytest
import torch

import tfm_kernels as tfk
from tests.patching.models import compare, transformers
from tests.patching.test_patch_decoder_model import BEHIND, IDS, MASKS, packings
from tests.patching.test_patch_decoder_model import build as decoder
from tests.patching.test_patch_encoders import build as encoder
from tfm_kernels.patching import swap

LEFT_OUT = -100
REASON = "its labels count padding, which -100 would leave out"


def bert(head):
    hf = transformers()
    torch.manual_seed(0)
    small = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=99)
    config = hf.BertConfig(**small, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return getattr(hf, f"BertFor{head}")(config).eval()


HEADS = {
    "llama": lambda: decoder("llama", head=True),
    "bert tokens": lambda: bert("TokenClassification"),
    "bert masked": lambda: bert("MaskedLM"),
    "modernbert": lambda: encoder("ModernBert", "ForMaskedLM"),
    "mpnet": lambda: encoder("MPNet", "ForMaskedLM"),  # whose attention patching leaves to its layers
}


def trained(model, mask, labels, **more):
    """The loss and its gradients."""
    model.zero_grad()
    loss = model(input_ids=IDS, attention_mask=mask, labels=labels, **more).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


def labelled(name, mask, counting):
    """Labels of all tokens, and of padding too where they are to count it."""
    labels = IDS % 2 if name == "bert tokens" else IDS
    return labels if counting else labels.masked_fill(mask == 0, LEFT_OUT)


@pytest.mark.parametrize("counting", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_labels_at_padding_are_looked_at(name, counting):
    model, labels = HEADS[name](), labelled(name, BEHIND, counting)
    stock, patched = trained(model, BEHIND, labels), copy.deepcopy(model)
    with tfk.patch(patched) as report, packings() as seen:
        compare(trained(patched, BEHIND, labels), stock, 1e-5)
        assert len(seen) == (not counting)
        told = [reason for met in report.fallbacks.values() for reason in met]
        assert told == [REASON] * counting
        assert "runs padded where its labels count padding" in report.entries[0].note
        padding = BEHIND == 0  # without labels it runs packed all the same
        y = patched(IDS, attention_mask=BEHIND).logits
        assert len(seen) == 1 + (not counting) and torch.equal(y[padding], y[padding][:1].expand_as(y[padding]))


def test_a_label_that_padding_in_front_foretells_is_counted():
    """A decoder's first token is foretold by the padding before it; -100 there leaves that out."""
    model, mask = decoder("llama", head=True), MASKS["in front"]
    labels = labelled("llama", mask, False)
    first = mask.cumsum(1) == 1
    for told, counts in ((labels, True), (labels.masked_fill(first & (mask == 1), LEFT_OUT), False)):
        stock, patched = trained(model, mask, told), copy.deepcopy(model)
        with tfk.patch(patched), packings() as seen:
            compare(trained(patched, mask, told), stock, 1e-5)
            assert len(seen) == (not counts)


def test_labels_moved_beforehand_and_those_of_whole_rows():
    model = decoder("llama", head=True)
    moved = torch.nn.functional.pad(IDS, (0, 1), value=LEFT_OUT)[:, 1:].contiguous()
    for more, counts in ((moved, True), (moved.masked_fill(BEHIND == 0, LEFT_OUT), False)):
        patched, told = copy.deepcopy(model), dict(shift_labels=more)
        stock = trained(model, BEHIND, IDS.masked_fill(BEHIND == 0, LEFT_OUT), **told)
        with tfk.patch(patched), packings() as seen:
            compare(trained(patched, BEHIND, IDS.masked_fill(BEHIND == 0, LEFT_OUT), **told), stock, 1e-5)
            assert len(seen) == (not counts)
    rows = bert("SequenceClassification")
    with tfk.patch(rows), packings() as seen:
        rows(IDS, attention_mask=BEHIND, labels=torch.tensor([0, 1, 1, 0]))
        assert len(seen) == 1


def test_labels_told_by_place():
    model = decoder("llama", head=True)
    told = (IDS, BEHIND, None, None, None, IDS)
    stock = model(*told).loss
    with tfk.patch(model), packings() as seen:
        torch.testing.assert_close(model(*told).loss, stock)
        assert not seen


def test_what_counts_padding_is_proven_either_way():
    for counting in (False, True):
        inputs = {"input_ids": IDS, "attention_mask": BEHIND, "labels": labelled("llama", BEHIND, counting)}
        report = tfk.prove(decoder("llama", head=True), {**inputs, "use_cache": False})
        assert report.passed, report.table()


@pytest.mark.parametrize("name", ["bert masked", "mpnet"])
def test_a_head_is_given_back_copied_and_patched_again(name):
    model = HEADS[name]()
    cls = type(model)
    tfk.patch(model)
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert swap.is_fused(other) and isinstance(other, cls) and type(other).__name__ == cls.__name__
        with packings() as seen:
            other(IDS, attention_mask=BEHIND, labels=IDS)
            assert not seen
    tfk.patch(model, packed=False)
    assert type(model) is cls
    tfk.patch(model)
    assert swap.is_fused(model)
    with pytest.raises(ValueError, match="backend"):
        tfk.patch(model, backend="none such")
    assert swap.is_fused(model) and tfk.unpatch(model) > 0 and type(model) is cls
    assert swap.OPTIONS not in model.__dict__


def test_a_patch_that_fails_leaves_a_head_as_it_was():
    model = torch.nn.ModuleDict({"text": HEADS["mpnet"](), "odd": torch.nn.Linear(2, 2)})
    cls, name = type(model["text"]), model["text"].config._attn_implementation

    class Odd(torch.nn.Linear):
        pass

    model["odd"].__class__ = Odd

    def fails(module):
        raise RuntimeError("no")

    first = tfk.patching.Recipe("test.fails", lambda m: fails(m) if type(m) is Odd else False, lambda c: c, "")
    tfk.patching.register_recipe(first)
    try:
        with pytest.raises(RuntimeError, match="no"):
            tfk.patch(model)
        assert type(model["text"]) is cls and swap.OPTIONS not in model["text"].__dict__
        tfk.patch(model["text"])
        with pytest.raises(RuntimeError, match="no"):
            tfk.patch(model, packed=False)
        assert swap.is_fused(model["text"]) and model["text"].config._attn_implementation == name
    finally:
        tfk.patching.register_recipe(tfk.patching.Recipe("test.fails", lambda m: False, lambda c: c, ""))


def test_no_head_is_looked_at_below_which_nothing_packs():
    model = transformers().GPT2LMHeadModel(transformers().GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=99))
    cls = type(model)
    with tfk.patch(model):
        assert type(model) is cls


TAKEN = "its head takes padding for the last token: pad_token_id does not say what its mask says"


def sequences(family, pad=0):
    """A decoder's head for sequences."""
    hf = transformers()
    config = decoder(family, head=True).config
    config.num_labels, config.pad_token_id = 3, pad
    torch.manual_seed(1)
    own = {"gemma3_text": "Gemma3TextForSequenceClassification"}.get(family)
    kind = getattr(hf, own) if own else hf.AutoModelForSequenceClassification._model_mapping[type(config)]
    return kind(config).eval()


def heir(kind):
    class Own(kind):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    return Own


PADDED = {
    "padded by pad_token_id": (IDS * BEHIND, 0, True),
    "padded by another token": (IDS * BEHIND + 5 * (1 - BEHIND), 0, False),
    "a row that ends with pad_token_id": (IDS * BEHIND + 7 * (1 - BEHIND), 7, True),
}


@pytest.mark.parametrize("inherits", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("how", PADDED)
def test_the_token_that_a_head_for_sequences_takes(family, how, inherits):
    ids, pad, packs = PADDED[how]
    model, labels = sequences(family, pad), torch.tensor([0, 2, 1, 1])
    if inherits:
        model.__class__ = heir(type(model))
    run = lambda m: m(input_ids=ids, attention_mask=BEHIND, labels=labels)
    stock = run(model)
    with tfk.patch(model) as report, packings() as seen:
        found = run(model)
        assert len(seen) == packs
        assert [reason for met in report.fallbacks.values() for reason in met] == [TAKEN] * (not packs)
    compare({"logits": found.logits, "loss": found.loss}, {"logits": stock.logits, "loss": stock.loss}, 1e-5)


def test_a_head_for_sequences_given_embeddings_or_no_pad_token():
    """It takes each row's last place."""
    model = sequences("llama")
    told = {"inputs_embeds": model.model.embed_tokens(IDS).detach()}
    one = sequences("llama", None)
    with packings() as seen:
        for each, given, mask, packs in (
            (model, told, BEHIND, 0),
            (model, told, MASKS["in front"], 1),
            (one, {"input_ids": IDS[1:2]}, BEHIND[1:2], 0),
            (one, {"input_ids": IDS[1:2]}, MASKS["in front"][1:2], 1),
        ):
            stock = each(**given, attention_mask=mask).logits
            seen.clear()
            with tfk.patch(each):
                compare({"": each(**given, attention_mask=mask).logits}, {"": stock}, 1e-5)
            assert len(seen) == packs


def test_labels_of_tokens_themselves_do_not_reach_back():
    """Those of padding before the first token are left out, and it foretells nothing."""
    model, mask = bert_of_decoder(), MASKS["in front"]
    labels = (IDS % 2).masked_fill(mask == 0, LEFT_OUT)
    stock, patched = trained(model, mask, labels), copy.deepcopy(model)
    with tfk.patch(patched), packings() as seen:
        compare(trained(patched, mask, labels), stock, 1e-5)
        assert len(seen) == 1


def bert_of_decoder():
    """A head for tokens above a decoder."""
    hf = transformers()
    torch.manual_seed(1)
    return hf.LlamaForTokenClassification(decoder("llama", head=True).config).eval()


@pytest.mark.parametrize("name", HEADS)
def test_labels_that_a_subclass_hands_on(name):
    model = HEADS[name]()
    model.__class__ = heir(type(model))
    labels = labelled(name, BEHIND, True)
    stock, patched = trained(model, BEHIND, labels), copy.deepcopy(model)
    with tfk.patch(patched), packings() as seen:
        compare(trained(patched, BEHIND, labels), stock, 1e-5)
        assert not seen


def test_a_head_whose_instance_has_a_forward_of_its_own():
    """As accelerate gives models: nobody sees its labels."""
    model = decoder("llama", head=True)
    own = type(model).forward
    model.forward = types.MethodType(lambda self, *args, **kwargs: own(self, *args, **kwargs), model)
    stock = trained(model, BEHIND, IDS)
    with tfk.patch(model) as report, packings() as seen:
        compare(trained(model, BEHIND, IDS), stock, 1e-5)
        assert not seen
        notes = {entry.name: entry.note for entry in report.entries if entry.note}
        assert "runs padded: its model's head has a forward of its own, whose labels may count padding" in notes[""]


def test_the_last_logits_of_padded_prompts():
    """What follows padding follows from it; padding in front is none of their business."""
    model = decoder("llama", head=True)
    for mask, packs in ((BEHIND, 0), (MASKS["in front"], 1)):
        stock = model(IDS, attention_mask=mask, logits_to_keep=2).logits
        with tfk.patch(model), packings() as seen:
            compare({"": model(IDS, attention_mask=mask, logits_to_keep=2).logits[:, -1:]}, {"": stock[:, -1:]}, 1e-5)
            assert len(seen) == packs
            told = dict(attention_mask=mask, do_sample=False, max_new_tokens=4, pad_token_id=0, eos_token_id=None)
            found = model.generate(IDS, **told)
        assert torch.equal(found, model.generate(IDS, **told))
