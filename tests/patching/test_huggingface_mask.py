"""The masks of decoder-only models arrive at the ops as data: padding, windows and caches, and never written out."""

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from tests.patching.models import decoder, keeps_attention, transformers
from tfm_kernels.mask import Mask
from tfm_kernels.patching import block, huggingface
from tfm_kernels.patching.huggingface_mask import as_data

WINDOW, LENGTH = 4, 11
WINDOWED = ("mistral", "qwen2", "qwen3", "gemma3_text", "phi3", "smollm3", "olmo3")
OTHERS_WITH_A_WINDOW = ("cohere2", "exaone4", "ministral", "mixtral", "phimoe", "qwen2_moe", "qwen3_moe", "starcoder2")
UNWINDOWED = (
    "apertus arcee bitnet codegen cohere deepseek_v3 ernie4_5 gemma glm glm4 gpt2 gpt_bigcode gpt_neox gptj granite "
    "granitemoe helium hunyuan_v1_dense llama ministral3 nemotron olmo olmo2 olmoe opt persimmon phi seed_oss stablelm"
).split()
ALIKE = ("mistral", "mixtral", "phi3", "phimoe", "qwen3_moe", "starcoder2")  # all layers have the window
WITH_A_WINDOW = dict(sliding_window=WINDOW, use_sliding_window=True, max_window_layers=0)
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}


def build(family):
    window = WITH_A_WINDOW if family in WINDOWED + OTHERS_WITH_A_WINDOW else {}
    return decoder(family, **window, **(MIXED if window and family not in ALIKE else {}))


def padded(side):
    """(ids, attention_mask) of three rows of different lengths, or of one length for "none"."""
    torch.manual_seed(1)
    ids, lengths = torch.randint(3, 99, (3, LENGTH)), torch.tensor([4, LENGTH, 7])[:, None]
    at = torch.arange(LENGTH)
    keep = {"right": at < lengths, "left": at >= LENGTH - lengths, "none": at.expand(3, -1) >= 0}[side]
    return ids, keep.long()


@pytest.fixture
def seen(monkeypatch):
    """The masks that attention is called with."""
    masks, attend = [], huggingface.attend

    def spy(query, key, value, mask, **options):
        masks.append(mask)
        return attend(query, key, value, mask, **options)

    monkeypatch.setattr(huggingface, "attend", spy)
    return masks


def windowed(mask):
    return -(WINDOW - 1) in (mask.top_left.low, mask.bottom_right.low)


@pytest.mark.parametrize("side", ["right", "left", "none"])
@pytest.mark.parametrize("family", (*WINDOWED, *OTHERS_WITH_A_WINDOW, *UNWINDOWED))
def test_a_forward(family, side, seen):
    model, (ids, keep) = build(family), padded(side)
    run = lambda m: m(ids, attention_mask=keep, use_cache=False).logits[keep.bool()]
    wanted, kept = run(model), keeps_attention(model)
    with tfk.patch(model, packed=False) as report:
        given = run(model)
        assert not any("attention was called" in reason for met in report.fallbacks.values() for reason in met)
    torch.testing.assert_close(given, wanted)
    if kept:
        assert not seen and not report.entries[0].replaced
        return
    assert len(seen) == 2 and all(isinstance(mask, Mask) for mask in seen)
    for mask in seen:
        assert (mask.keep_matrix is None) if side == "none" else mask.keep_matrix.shape == (3, 1, 1, LENGTH)
    assert any(map(windowed, seen)) == (family in WINDOWED + OTHERS_WITH_A_WINDOW)


class Live(nn.Module):
    """What a model says where there is no padding."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, keep):
        return self.model(ids, attention_mask=keep, use_cache=False).logits[keep.bool()]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ("gemma", "olmo2", *WINDOWED))
def test_proven(family, dtype, side):
    report = tfk.prove(Live(build(family)), padded(side), dtype=dtype, steps=2)
    assert report.passed, report.table()
    assert not any("original code" in note for note in report.notes), report.notes


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ("gemma", "gpt_neox", "olmo2", *WINDOWED))
def test_generation(family, cache, seen):
    """Prompts longer than the window, then more tokens than the window holds."""
    model, (ids, keep) = build(family), padded("left")
    told = dict(attention_mask=keep, max_new_tokens=2 * WINDOW, do_sample=False, pad_token_id=0, eos_token_id=None)
    if cache == "static":
        told["cache_implementation"] = "static"
    wanted = model.generate(ids, **told)
    with tfk.patch(model, packed=False):
        assert torch.equal(model.generate(ids, **told), wanted)
    prompt, rest = seen[:2], seen[2:]
    assert all(isinstance(mask, Mask) and mask.keep_matrix is not None for mask in prompt)
    assert any(map(windowed, prompt)) == (family in WINDOWED)
    if cache == "dynamic":
        assert len(rest) == 2 * (2 * WINDOW - 1) and all(isinstance(mask, Mask) for mask in rest)


CACHES = [  # kind, tokens that it holds, new tokens, padding; with none the padding mask tells how many keys there are
    (kind, past, new, padding)
    for kind in ("none", "dynamic", "growing", "static")
    for past in ((0,) if kind == "none" else (0, 2, WINDOW, 9))
    for new in (1, 5)
    for padding in ("none", "left", "right", *(("short",) if kind != "none" else ()))
]


@pytest.mark.parametrize("kind, past, new, padding", CACHES)
@pytest.mark.parametrize("window", [False, True])
def test_a_mask_is_that_of_transformers(kind, past, new, padding, window):
    """A cache that knows its layers' windows, one that does not and grows, and one of a fixed size."""
    hf = transformers()
    from transformers import masking_utils

    huggingface.register()
    config = hf.Qwen3Config(**WITH_A_WINDOW, **MIXED, num_hidden_layers=2, head_dim=8)
    make = masking_utils.create_sliding_window_causal_mask if window else masking_utils.create_causal_mask
    keep = torch.ones(2, past + new, dtype=torch.long)
    keep[1, : past + new - 1] = 1 - int(padding == "left")
    keep[1, (past + new + 1) // 2 :] = 1 - int(padding == "right")
    keep = {"none": None, "short": keep[:, :-1]}.get(padding, keep)
    cache = {
        "none": lambda: None,
        "dynamic": lambda: hf.DynamicCache(config=config),
        "growing": lambda: hf.DynamicCache(),
        "static": lambda: hf.StaticCache(config=config, max_cache_len=20),
    }[kind]()
    if past:
        for layer in range(2):
            cache.update(*torch.zeros(2, 2, 2, past, 8), layer)

    def made(name):
        config._attn_implementation = name
        return make(config, torch.zeros(2, new, 32), keep, cache)

    wanted, given = made("eager") == 0, made("tfm_kernels")
    if kind == "static" and (new == 1 or past and not window):
        assert isinstance(given, torch.Tensor)  # one row, or an offset that is a tensor
        given = Mask.keep(given)
    assert isinstance(given, Mask)
    shape = (2, 1, *wanted.shape[2:])
    assert torch.equal(given.dense(*shape), wanted.expand(shape))


def test_packed_sequences_keep_their_dense_mask(seen):
    model = build("qwen3")
    ids, positions = padded("none")[0], torch.tensor([0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]).expand(3, -1)
    run = lambda m: m(ids, position_ids=positions, use_cache=False).logits
    wanted = run(model)
    with tfk.patch(model, packed=False):
        torch.testing.assert_close(run(model), wanted)
    assert [type(mask) for mask in seen] == [torch.Tensor] * 2


@pytest.mark.parametrize("family", ["gemma", "mistral", "gemma3_text"])
def test_a_prepared_mask_is_not_made_again(family):
    """As a model of images and text around a language model makes it."""
    from transformers.masking_utils import create_masks_for_generate

    model, (ids, keep) = build(family), padded("right")
    wanted = model(ids, attention_mask=keep, use_cache=False).logits[keep.bool()]
    with tfk.patch(model):
        masks = create_masks_for_generate(model.config, torch.zeros(3, LENGTH, 0), keep, None)
        assert all(isinstance(mask, Mask) for mask in (masks.values() if isinstance(masks, dict) else [masks]))
        given = model(ids, attention_mask=masks, use_cache=False).logits[keep.bool()]
    torch.testing.assert_close(given, wanted)


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_compiled(family, seen):
    model, (ids, keep) = build(family), padded("left")
    run = lambda m: m(ids, attention_mask=keep, use_cache=False).logits[keep.bool()]
    wanted = run(model)
    with tfk.patch(model):
        given = run(torch.compile(model, fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(given, wanted)
    torch._dynamo.reset()


OWN_ATTENTION = ["bloom", "mpt", "gpt_neo", "xglm"]


@pytest.mark.parametrize("side", ["right", "none"])
@pytest.mark.parametrize("family", OWN_ATTENTION)
def test_attention_of_their_own_sees_data(family, side, monkeypatch):
    """Of the masks that these models write out."""
    masks, attend = [], block.attend

    def spy(query, key, value, mask, **options):
        masks.append(mask)
        return attend(query, key, value, mask, **options)

    monkeypatch.setattr(block, "attend", spy)
    model, (ids, keep) = build(family), padded(side)
    with tfk.patch(model):
        model(ids, attention_mask=keep, use_cache=False)
    assert len(masks) == 2 and all(isinstance(mask, Mask) for mask in masks)
    for mask in masks:
        assert 0 in (mask.top_left.high, mask.bottom_right.high)
        assert (mask.keep_matrix is None) if side == "none" else mask.keep_matrix.shape == (3, 1, 1, LENGTH)
    assert any(map(windowed, masks)) == (family == "gpt_neo")


@torch.no_grad()
def test_gpt_neo_adds_a_mask_of_bool():
    """As its own code does, to which True is 1."""
    model, (ids, _) = build("gpt_neo"), padded("none")
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(len(ids), 1, -1, -1)
    wanted = model(ids, attention_mask=mask, use_cache=False).logits
    with tfk.patch(model) as report:
        torch.testing.assert_close(model(ids, attention_mask=mask, use_cache=False).logits, wanted)
        reasons = {reason for counts in report.fallbacks.values() for reason in counts}
    assert reasons == {"its own code adds a mask of bool to the scores as numbers"}


class Whole(nn.Module):
    """All that a model says, at padding too."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, keep):
        return self.model(ids, attention_mask=keep, use_cache=False).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", OWN_ATTENTION)
def test_rows_of_padding_in_front_are_the_same(family, dtype):
    """Which see no key: their softmax, of one number in all places, weighs all alike."""
    report = tfk.prove(Whole(build(family)), padded("left"), dtype=dtype, steps=2)
    assert report.passed, report.table()
    assert any("original code" in note for note in report.notes) == (family == "xglm")
    model, given = Whole(build(family)).eval(), padded("left")
    with torch.no_grad():
        wanted = model(*given)
        with tfk.patch(model) as report:
            torch.testing.assert_close(model(*given), wanted)
            assert not report.fallbacks


def added(keep):
    return torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("written", [added, torch.logical_not], ids=["added", "hidden"])
@pytest.mark.parametrize("queries, keys", [(7, 7), (3, 7), (1, 7), (1, 1)])
@pytest.mark.parametrize("columns", ["all", "some", "none"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_dense_mask_that_is_data(written, queries, keys, columns, causal):
    shape = (2, 1, queries, keys)
    keep = torch.ones(shape).tril(keys - queries if causal else keys) > 0
    if columns != "all":
        keep[1, ..., : keys if columns == "none" else keys // 2] = False
    dense = written(keep)
    given = as_data(dense)
    if not keep.any(-1).all():
        assert given is dense
        return
    assert given is None or isinstance(given, Mask)
    shown = torch.ones(shape, dtype=torch.bool) if given is None else given.dense(*shape).expand(shape)
    assert torch.equal(shown, keep)
    whole = columns == "all" or (columns == "some" and keys == 1)
    assert given is None or (given.keep_matrix is None) == whole
    assert given is None or whole or given.keep_matrix.shape[-2] == 1
    assert (given is None) == (whole and (not causal or queries == 1))


def test_a_dense_mask_that_says_more_stays():
    torch.manual_seed(0)
    scores, scattered = torch.randn(2, 1, 5, 5), torch.rand(2, 1, 5, 5) < 0.5
    scattered[..., -1, :] = True
    assert as_data(None) is None
    assert as_data(scores) is scores
    assert torch.equal(as_data(added(scattered)).keep_matrix, scattered)
    assert torch.equal(as_data(~scattered).keep_matrix, scattered)
