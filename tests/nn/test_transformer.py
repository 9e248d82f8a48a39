"""Layers and stacks: torch.nn's, option by option, in both norm orders; and that evaluation equals training."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfm_kernels as tfk
from tfm_kernels.testing.float64 import assert_same_in_float64

from .twins import BACKENDS, assert_same, label, pairwise, randn, results, twins

B, TS, TT, E, H, FF = 3, 5, 6, 12, 4, 20
SRC_PAD = torch.arange(TS) >= torch.tensor([2, 5, 3])[:, None]
TGT_PAD = torch.arange(TT) >= torch.tensor([6, 4, 3])[:, None]
CAUSAL = nn.Transformer.generate_square_subsequent_mask(TT, dtype=torch.float64)
CROSS = torch.tensor([[i + j == 4 for j in range(TS)] for i in range(TT)])

LAYER = {
    "backend": BACKENDS,
    "dtype": [torch.float64, torch.float32],
    "norm_first": [False, True],
    "batch_first": [True, False],
    "bias": [True, False],
    "activation": ["relu", "gelu", F.gelu, nn.GELU("tanh"), torch.tanh],
    "training": [True, False],
    "unbatched": [False, True],
}
KEYWORDS = ("backend", "dtype", "norm_first", "batch_first", "bias", "activation")


@pytest.fixture(autouse=True)
def _without_fast_path():
    """torch's evaluation path gives other values in padding, and NaN; it is not what a drop-in is measured by."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(enabled)


def pair(name, case, *args):
    dropout = 0.0 if case["training"] else 0.4
    theirs, ours = twins(name, *args, dropout=dropout, **{k: case[k] for k in KEYWORDS})
    return theirs.train(case["training"]), ours.train(case["training"])


def laid_out(case, *tensors):
    if case["unbatched"]:
        return [t[0] for t in tensors]
    return list(tensors) if case["batch_first"] else [t.transpose(0, 1) for t in tensors]


def first(case, mask):
    return mask[0] if case["unbatched"] and mask is not None else mask


@pytest.mark.parametrize("case", pairwise(**LAYER, mask=["none", "causal", "float"], pad=[True, False]), ids=label)
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_encoder_layer_is_torchs(case):
    mask = {"none": None, "causal": CAUSAL[:TS, :TS] != 0, "float": randn(TS, TS)}[case["mask"]]
    options = {"src_mask": mask, "is_causal": case["mask"] == "causal"}
    if case["pad"]:
        options["src_key_padding_mask"] = first(case, SRC_PAD)
    theirs, ours = pair("TransformerEncoderLayer", case, E, H, FF)
    assert_same(theirs, ours, laid_out(case, randn(B, TS, E)), **options)


@pytest.mark.parametrize("case", pairwise(**LAYER, cross=[None, CROSS], pad=[True, False]), ids=label)
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_decoder_layer_is_torchs(case):
    options = {"tgt_mask": CAUSAL, "tgt_is_causal": True, "memory_mask": case["cross"]}
    if case["pad"]:
        options["tgt_key_padding_mask"] = first(case, TGT_PAD)
        options["memory_key_padding_mask"] = first(case, SRC_PAD)
    theirs, ours = pair("TransformerDecoderLayer", case, E, H, FF)
    assert_same(theirs, ours, laid_out(case, randn(B, TT, E), randn(B, TS, E, seed=1)), **options)


@pytest.mark.parametrize("case", pairwise(**LAYER, masks=["none", "detected", "said", "padded"]), ids=label)
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_transformer_is_torchs(case):
    options = {
        "none": {},
        "detected": {"tgt_mask": CAUSAL, "src_mask": CAUSAL[:TS, :TS] != 0},
        "said": {"tgt_mask": CAUSAL, "tgt_is_causal": True, "memory_mask": CROSS},
        "padded": {
            "tgt_mask": CAUSAL != 0,
            "src_key_padding_mask": first(case, SRC_PAD),
            "tgt_key_padding_mask": first(case, TGT_PAD),
            "memory_key_padding_mask": first(case, SRC_PAD),
        },
    }[case["masks"]]
    theirs, ours = pair("Transformer", case, E, H, 2, 2, FF)
    assert_same(theirs, ours, laid_out(case, randn(B, TS, E), randn(B, TT, E, seed=1)), **options)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_stacks_without_and_with_a_final_norm(norm_first, norm):
    found = []
    for kind in (torch.nn, tfk.nn):
        torch.manual_seed(0)
        options = {"dropout": 0.0, "norm_first": norm_first, "batch_first": True, "dtype": torch.float64}
        final = kind.LayerNorm(E, dtype=torch.float64) if norm else None
        encoder_layer = kind.TransformerEncoderLayer(E, H, FF, **options)
        encoder = kind.TransformerEncoder(encoder_layer, 3, final, enable_nested_tensor=False)
        decoder_layer = kind.TransformerDecoderLayer(E, H, FF, **options)
        decoder = kind.TransformerDecoder(decoder_layer, 3, final)
        memory = results(encoder, [randn(B, TS, E)], src_key_padding_mask=SRC_PAD)
        found.append({**memory, **{f"d {k}": v for k, v in results(decoder, [randn(B, TT, E)] * 2).items()}})
    for name, expected in found[0].items():
        assert_same_in_float64(found[1][name], expected, name)


@pytest.mark.parametrize("norm_first", [False, True])
def test_evaluation_equals_training_without_dropout(norm_first):
    """Also without gradients and with padding, where torch takes another path: no shape and no value changes."""
    model = tfk.nn.Transformer(E, H, 2, 2, FF, 0.0, batch_first=True, norm_first=norm_first, backend="cpu")
    src, tgt = randn(B, TS, E, dtype=torch.float32), randn(B, TT, E, dtype=torch.float32)
    pad = SRC_PAD | (torch.arange(TS) == TS - 1)  # the longest sequence is shorter than the batch is wide
    masks = {"src_key_padding_mask": pad, "memory_key_padding_mask": pad}
    trained, memory = model.train()(src, tgt, **masks), model.encoder(src, src_key_padding_mask=pad)
    with torch.inference_mode():
        assert torch.equal(model.eval()(src, tgt, **masks), trained)
        assert torch.equal(model.encoder(src, src_key_padding_mask=pad), memory)
    assert memory.shape == src.shape


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm_first", [False, True])
def test_a_fully_padded_sequence_gives_no_nan(backend, norm_first):
    options = {"batch_first": True, "norm_first": norm_first, "dtype": torch.float64, "backend": backend}
    model = tfk.nn.Transformer(E, H, 1, 1, FF, 0.0, **options)
    pad = SRC_PAD.clone()
    pad[1] = True
    found = results(
        model, [randn(B, TS, E), randn(B, TT, E, seed=1)], src_key_padding_mask=pad, memory_key_padding_mask=pad,
        tgt_is_causal=True,
    )  # fmt: skip
    assert all(t.isfinite().all() for t in found.values())


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_dropout_repeats_with_the_seed_and_differs_without(backend, norm_first):
    model = tfk.nn.Transformer(E, H, 2, 1, FF, 0.5, batch_first=True, norm_first=norm_first, backend=backend)
    given = randn(B, TS, E, dtype=torch.float32), randn(B, TT, E, dtype=torch.float32, seed=1)
    torch.manual_seed(3)
    y = model(*given)
    torch.manual_seed(3)
    assert torch.equal(model(*given), y)
    assert not torch.equal(model(*given), y)


@pytest.mark.parametrize("norm_first", [False, True])
def test_dropout_is_the_same_on_every_backend(norm_first):
    found = []
    for backend in ("reference", "cpu"):
        torch.manual_seed(0)
        options = {"norm_first": norm_first, "dtype": torch.float64, "backend": backend}
        model = tfk.nn.Transformer(E, H, 2, 1, FF, 0.5, **options)
        torch.manual_seed(1)
        found.append(results(model, [randn(TS, B, E), randn(TT, B, E, seed=1)], tgt_is_causal=True))
    for name, tensor in found[0].items():
        assert_same_in_float64(found[1][name], tensor, name)


def test_the_causal_mask_is_recognised_once_and_only_where_nothing_was_said():
    hint = tfk.nn.attention.causal_hint
    future = torch.ones(4, 4).triu(1).bool()
    floating = nn.Transformer.generate_square_subsequent_mask(4)
    assert hint(future, None) and hint(floating, None) and hint(floating.half(), None)
    assert not hint(future, False) and hint(None, True) and hint(~future, True)
    other = [None, ~future, future.T, floating + 0.5, future[:3], future.expand(2, 4, 4), tfk.Mask.causal()]
    assert not any(hint(mask, None) for mask in other)
    assert not hint(floating.clone().requires_grad_(), None) and not hint(floating.to("meta"), None)


def test_a_stack_takes_layers_of_other_classes():
    class Plain(nn.Module):
        def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=None):
            self.given = src_mask, src_key_padding_mask, is_causal
            return src + 1

    stack = tfk.nn.TransformerEncoder(Plain(), 2)
    src = randn(B, TS, E)
    future = CAUSAL[:TS, :TS] != 0
    assert torch.equal(stack(src, future, SRC_PAD), src + 1 + 1)
    mask, pad, hint = stack.layers[1].given  # floating and with the hint, as torch's stack hands them on
    assert mask.dtype == pad.dtype == src.dtype and torch.equal(mask == -torch.inf, future) and hint is True
    theirs = nn.TransformerEncoderLayer(E, H, FF, 0.0, norm_first=True, batch_first=True, dtype=torch.float64)
    ours = tfk.nn.TransformerEncoderLayer(E, H, FF, 0.0, norm_first=True, batch_first=True, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    mixed = tfk.nn.TransformerEncoder(ours, 3)
    mixed.layers[1] = theirs
    pure = tfk.nn.TransformerEncoder(ours, 3)
    given = {"mask": future, "src_key_padding_mask": SRC_PAD}
    torch.testing.assert_close(mixed(src, **given), pure(src, **given), rtol=1e-11, atol=1e-12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchs = nn.TransformerEncoder(ours, 3).eval()
    torch.backends.mha.set_fastpath_enabled(True)
    with torch.no_grad():  # torch's stack must not hand our layers nested tensors
        torch.testing.assert_close(torchs(src, **given), pure(src, **given), rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(torchs(src, None, SRC_PAD), pure(src, None, SRC_PAD), rtol=1e-11, atol=1e-12)


def test_a_named_backend_reaches_every_child():
    model = tfk.nn.Transformer(E, H, 1, 1, FF, backend="aten")
    stack = tfk.nn.TransformerEncoder(tfk.nn.TransformerEncoderLayer(E, H), 2, tfk.nn.LayerNorm(E), backend="cpu")
    for module, name in ((model, "aten"), (stack, "cpu")):
        named = [child.backend for child in module.modules() if hasattr(child, "backend")]
        assert len(named) >= 8 and set(named) == {name}


def test_custom_encoder_and_decoder():
    class Twice(nn.Module):
        def forward(self, src, **masks):
            return 2 * src

    class Sum(nn.Module):
        def forward(self, tgt, memory, **masks):
            return tgt + memory

    model = tfk.nn.Transformer(E, H, custom_encoder=Twice(), custom_decoder=Sum(), batch_first=True)
    x = randn(B, TS, E)
    assert torch.equal(model(x, x), 3 * x) and not list(model.parameters())


class AtPlaces(nn.Module):
    """What forward_at gives, or the same from all of forward's output."""

    def __init__(self, encoder, places, mask, whole):
        super().__init__()
        self.encoder, self.places, self.mask, self.whole = encoder, places, mask, whole

    def forward(self, src):
        if not self.whole:
            return self.encoder.forward_at(src, self.places, self.mask)
        rows = torch.arange(len(src)).unsqueeze(1)
        return self.encoder(src, mask=self.mask)[rows, self.places]


def stack(norm_first, layers, final, backend):
    layer = tfk.nn.TransformerEncoderLayer(
        E, H, FF, 0.0, batch_first=True, norm_first=norm_first, dtype=torch.float64, backend=backend
    )
    return tfk.nn.TransformerEncoder(layer, layers, tfk.nn.LayerNorm(E, dtype=torch.float64) if final else None)


MASKS = [None, tfk.Mask.lengths(torch.tensor([2, 5, 3])), tfk.Mask.keep(~SRC_PAD[:, None, None, :])]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("layers, final", [(1, False), (2, True), (2, False), (0, True)])
@pytest.mark.parametrize("mask", MASKS, ids=["all", "lengths", "keep"])
@pytest.mark.parametrize("places", [[[0, 1], [4, 0], [2, 1]], [[3], [0], [2]]], ids=["two", "one"])
def test_a_stack_at_some_places_is_the_stack_there(backend, norm_first, layers, final, mask, places):
    """The output and every gradient, that of the input too."""
    encoder, places = stack(norm_first, layers, final, backend), torch.tensor(places)
    found, expected = (results(AtPlaces(encoder, places, mask, whole), [randn(B, TS, E)]) for whole in (False, True))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_in_float64(found[name], tensor, name)


QUERIES_DIFFER = {
    "causal": tfk.Mask.causal(),
    "window": tfk.Mask.window(1, 1, "bottom_right") & MASKS[1],
    "matrix": tfk.Mask.keep(torch.ones(TS, TS).tril(1).bool()),
    "tensor": torch.ones(TS, TS).triu(1).bool(),
}


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("mask", QUERIES_DIFFER.values(), ids=QUERIES_DIFFER)
def test_a_stack_at_some_places_under_a_mask_that_differs_between_queries(norm_first, mask):
    encoder, places = stack(norm_first, 2, True, "cpu"), torch.tensor([[0, 1], [4, 0], [2, 1]])
    found, expected = (AtPlaces(encoder, places, mask, whole)(randn(B, TS, E)) for whole in (False, True))
    assert_same_in_float64(found, expected)


class MixesRows(nn.Module):
    def __init__(self, before):
        super().__init__()
        self.before = before

    def forward(self, x):
        return self.before(x).cumsum(1)


MIXING = [(name, MixesRows) for name in ("norm", "layers.1.norm1", "layers.1.norm2", "layers.1.linear2")]
MIXING += [("layers.1.dropout2", MixesRows), ("layers.1.self_attn.out_proj", MixesRows)]
MIXING += [("norm", lambda before: tfk.nn.LayerNorm((TS, E), dtype=torch.float64))]


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("place, other", MIXING)
def test_a_stack_at_some_places_whose_own_modules_mix_them(norm_first, place, other):
    encoder, places = stack(norm_first, 2, True, "cpu"), torch.tensor([[0, 1], [4, 0], [2, 1]])
    encoder.set_submodule(place, other(encoder.get_submodule(place)))
    found, expected = (AtPlaces(encoder, places, None, whole)(randn(B, TS, E)) for whole in (False, True))
    assert_same_in_float64(found, expected)


def test_a_stack_at_some_places_whose_activation_mixes_them():
    encoder, places = stack(True, 2, True, "cpu"), torch.tensor([[0, 1], [4, 0], [2, 1]])
    encoder.layers[1].activation = lambda x: x.cumsum(1)
    found, expected = (AtPlaces(encoder, places, None, whole)(randn(B, TS, E)) for whole in (False, True))
    assert_same_in_float64(found, expected)


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_stack_at_some_places_computes_little_else(norm_first, monkeypatch):
    """Rows of each feed-forward block, and queries of each attention."""
    ffn, attention, seen = tfk.ops.ffn, tfk.ops.attention, []
    monkeypatch.setattr(tfk.ops, "ffn", lambda x, *a, **o: seen.append(tuple(x.shape[:-1])) or ffn(x, *a, **o))
    monkeypatch.setattr(tfk.ops, "attention", lambda q, *a, **o: seen.append(q.shape[2]) or attention(q, *a, **o))
    encoder, places = stack(norm_first, 2, True, "cpu"), torch.tensor([[0, 1], [4, 0], [2, 1]])
    encoder.forward_at(randn(B, TS, E), places)
    assert seen == [TS, (B, TS), 2, (B, 2)]


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(
    "watched", ["", "layers.1", "layers.1.self_attn", "layers.1.norm2", "layers.1.linear2", "layers.1.dropout", "norm"]
)
def test_whoever_watches_the_last_layer_sees_all_of_it(norm_first, watched):
    encoder, places, seen = stack(norm_first, 2, True, "cpu"), torch.tensor([[0, 1], [4, 0], [2, 1]]), []
    x = randn(B, TS, E)
    expected = encoder.forward_at(x, places)
    hook = lambda module, given, output: seen.append(output[0] if isinstance(output, tuple) else output)
    encoder.get_submodule(watched).register_forward_hook(hook)
    assert_same_in_float64(encoder.forward_at(x, places), expected)
    assert [tuple(output.shape[:2]) for output in seen] == [(B, TS)]


@pytest.mark.parametrize(
    ("places", "got"),
    [
        (torch.zeros(2, 1, dtype=torch.int64), r"int64 of shape \(2, 1\)"),
        (torch.zeros(3, dtype=torch.int64), r"int64 of shape \(3,\)"),
        (torch.zeros(3, 1), r"float32 of shape \(3, 1\)"),
    ],
)
def test_places_that_do_not_fit_are_refused(places, got):
    words = rf"^TransformerEncoder: places must be int64 of shape \(3, C\) to match src \(3, 5, 12\), got {got}$"
    with pytest.raises(ValueError, match=words):
        stack(True, 1, True, "cpu").forward_at(randn(B, TS, E), places)
    with pytest.raises(RuntimeError, match="out of bounds"):
        stack(True, 1, True, "cpu").forward_at(randn(B, TS, E), torch.full((3, 1), TS))
