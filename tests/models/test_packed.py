"""Padding behind the tokens is left out where nobody could tell: numbers, dropped elements, maps, gradients stay."""

import functools

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from tests.models.peers import KINDS, inputs, small, tokens
from tfm_kernels.models import stack
from tfm_kernels.nn import TransformerDecoder, TransformerEncoder
from tfm_kernels.nn.packed import Packed
from tfm_kernels.testing.float64 import assert_same_in_float64


@pytest.fixture(autouse=True)
def packed(monkeypatch):
    """The shapes of what was packed, however little padding there is."""
    monkeypatch.setattr(stack, "LEAST", 1)
    shapes, real = [], Packed.pack
    monkeypatch.setattr(Packed, "pack", lambda self, x: shapes.append(tuple(x.shape)) or real(self, x))
    return shapes


def padded(run):
    """What ``run()`` gives where stacks run with their padding."""
    with pytest.MonkeyPatch.context() as patch:
        for stack in (TransformerEncoder, TransformerDecoder):
            patch.setattr(stack, "takes_packed", lambda self: False)
        return run()


def trained(run, ids, select, model=None):
    model = model or run
    torch.manual_seed(2)
    model.zero_grad()
    y = run(*ids)[select]
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
    return {"output": y.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("final_norm", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_gradients_and_dropout_are_those_of_the_padded_run(kind, backend, norm_first, final_norm, packed):
    changes = {"norm_first": norm_first, "final_norm": final_norm, "dropout": 0.3}
    model, ids = small(kind, dtype=torch.float64, backend=backend, **changes).train(), inputs(kind)
    shapes = [(3, 7, 16)] if kind != "translation" else [(3, 7, 16), (3, 6, 16), (3, 7, 16)]
    found = trained(model, ids, tokens(kind, ids))
    assert packed == shapes
    expected = padded(lambda: trained(model, ids, tokens(kind, ids)))
    assert packed == shapes and found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_in_float64(found[name], tensor, name)


@pytest.mark.parametrize("where", ["behind", "in front"])
def test_features_at_are_those_of_features(where):
    model, (ids,) = small("masked", dtype=torch.float64), inputs("masked")
    ids, places = ids if where == "behind" else ids.flip(1), torch.tensor([[0, 6], [3, 5], [2, 6]])
    wanted = model.features(ids).gather(1, places[..., None].expand(-1, -1, 16))
    assert_same_in_float64(model.features_at(ids, places), wanted, "features")


def test_little_padding_stays(packed, monkeypatch):
    monkeypatch.undo()
    seen, real = [], Packed.pack
    monkeypatch.setattr(Packed, "pack", lambda self, x: seen.append(1) or real(self, x))
    model, ids = small("masked"), torch.ones(64, 32, dtype=torch.long)
    for hidden, packs in ((1, 0), (2, 1)):
        ids[:, 32 - hidden :] = 0
        model(ids)
        assert len(seen) == packs
        model(ids[:31])
    assert len(seen) == 1


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("norm_first", [False, True])
def test_a_masked_model_is_asked_for_places(norm_first, layers, packed):
    model = small("masked", dtype=torch.float64, layers=layers, norm_first=norm_first, dropout=0.3).train()
    (ids,), places = inputs("masked"), torch.tensor([[0, 5], [3, 1], [2, 6]])
    features = functools.partial(trained, model.features_at, [ids, places], slice(None), model)
    found = features()
    assert packed == [(3, 7, 16)] * (layers > 1)
    for name, tensor in padded(features).items():
        assert_same_in_float64(found[name], tensor, name)


@pytest.mark.parametrize("kind", KINDS)
def test_maps_are_those_of_the_padded_run(kind, packed):
    model, ids = small(kind, dtype=torch.float64), inputs(kind)
    maps = tfk.get_attention_maps(model, *ids)
    assert packed
    rows = [(each != 0)[:, None, :, None] for each in ids]
    for name, expected in padded(lambda: tfk.get_attention_maps(model, *ids)).items():
        shown = rows["decoder" in name]
        assert_same_in_float64(maps[name] * shown, expected * shown, name)


@pytest.mark.parametrize("dynamic", ["int8_dynamic", "int8_weight_only"])
def test_quantized_models_pack(dynamic, packed):
    model, ids = small("masked"), inputs("masked")
    tfk.quantize(model, dynamic)
    with torch.no_grad():
        found = model(*ids)
        assert packed
        expected = padded(lambda: model(*ids))
    shown = tokens("masked", ids)
    assert (found - expected)[shown].abs().max() <= 1e-5 * expected[shown].abs().max()


@pytest.mark.parametrize("kind", ["masked", "causal", "translation"])
@pytest.mark.parametrize("where", ["behind", "in front"])
def test_features_are_0_behind_the_last_token(kind, where):
    model, ids = small(kind), inputs(kind)
    shown = tokens(kind, ids)
    if where == "in front":
        ids, shown = [each.flip(1) for each in ids], torch.ones_like(shown)
    for features in (model.features(*ids), padded(lambda: model.features(*ids))):
        assert (features[~shown] == 0).all() and (features[shown] != 0).all()


@pytest.mark.parametrize("lengths", [(7, 7, 7), (7, 1, 3)])
@pytest.mark.parametrize("target_lengths", [(6, 6, 6), (6, 1, 3)])
def test_source_and_target_are_padded_each_by_itself(lengths, target_lengths, packed):
    model, ids = small("translation", dtype=torch.float64), inputs("translation", lengths, target_lengths)
    found, shown = model(*ids), tokens("translation", ids)
    assert len(packed) == (3 in lengths) + 2 * (3 in target_lengths)
    assert_same_in_float64(found[shown], padded(lambda: model(*ids))[shown], "output")


def test_decode_takes_any_mask_of_the_memory(packed):
    model, ids = small("translation", dtype=torch.float64), inputs("translation")
    memory, found = model.encode(ids[0])
    packed.clear()
    assert_same_in_float64(model.decode(ids[1], memory, found.mask), model.features(*ids), "features")
    masks = [tfk.Mask.keep(found.keep[:, None, None, :]), tfk.Mask.lengths(torch.tensor([2, 1, 7])), None]
    for mask, packs in zip(masks, [False, True, True], strict=True):
        packed.clear()
        features = model.decode(ids[1], memory, mask)
        assert len(packed) == 2 * packs
        assert_same_in_float64(features, padded(functools.partial(model.decode, ids[1], memory, mask)), "features")
    with pytest.raises(ValueError, match="key must have the batch size 3 of query"):
        model.decode(ids[1], memory[:1], None)


def test_parts_of_ones_own_are_heeded():
    class Own(tfk.models.TranslationTransformer):
        def encode(self, source_ids):
            memory, found = super().encode(source_ids)
            return memory, found._replace(mask=tfk.Mask.lengths(torch.ones(3, dtype=torch.long)))

        def decode(self, *given):
            return 2 * super().decode(*given)

    model, ids = small("translation", dtype=torch.float64), inputs("translation")
    memory, _ = model.encode(ids[0])
    expected = 2 * model.decode(ids[1], memory, tfk.Mask.lengths(torch.ones(3, dtype=torch.long)))
    model.__class__ = Own
    assert_same_in_float64(model.features(*ids), expected, "features")


def test_a_start_that_is_padding_sees_the_source(packed):
    model, target = small("translation"), torch.zeros(3, 1, dtype=torch.long)
    first, second = (model.features(source, target) for source in (inputs("translation")[0], torch.ones(3, 4).long()))
    assert (first != second).any(-1).all() and len(packed) == 1


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def hooked(stack):
    stack.layers[1].linear1.register_forward_hook(lambda *_: None)


def watched(stack):
    stack.register_forward_pre_hook(lambda *_: None)


def replaced(stack):
    stack.layers[0].linear2 = Doubled(24, 16)


def own_activation(stack):
    stack.layers[0].activation = lambda x: x - x.mean()


def own_block(stack):
    stack.layers[0]._ff_block = lambda x: x


def identity(stack):
    stack.layers[0].norm2 = nn.Identity()


def test_unfused_dropout_is_given_the_padding(packed):
    model, ids = small("masked", dropout=0.3), inputs("masked")
    identity(model.encoder)
    model.eval()(*ids)
    assert len(packed) == 1
    model.train()(*ids)
    assert len(packed) == 1


def more_keys(stack):
    stack.layers[0].self_attn.add_zero_attn = True


def across(stack):
    stack.layers[0].multihead_attn.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("change", [hooked, watched, replaced, own_activation, own_block, more_keys, across])
def test_a_decoder_that_could_tell_is_given_the_padding(change, packed):
    model, ids = small("translation"), inputs("translation")
    change(model.transformer.decoder)
    model(*ids)
    assert packed == [(3, 7, 16)]


@pytest.mark.parametrize(
    "change", [hooked, watched, replaced, own_activation, own_block, more_keys], ids=lambda f: f.__name__
)
def test_what_could_tell_is_given_the_padding(change, packed):
    model, ids = small("masked"), inputs("masked")
    change(model.encoder)
    model(*ids)
    assert packed == []


def test_a_sight_that_differs_from_row_to_row_runs_padded(packed):
    model, ids = small("causal"), inputs("causal")
    model.sight = tfk.Mask.causal() & tfk.Mask.lengths(torch.tensor([6, 3, 7]))
    model(*ids)
    assert packed == []
    model.sight = tfk.Mask.window(2, 0)
    found = model(*ids)
    shown = tokens("causal", ids)
    assert packed and torch.equal(found[shown], padded(lambda: model(*ids))[shown])


def test_a_batch_of_nothing_but_padding_is_0_but_for_its_first_position(packed):
    features = small("masked").features(torch.zeros(2, 5, dtype=torch.long))
    assert (features[:, 1:] == 0).all() and (features[:, 0] != 0).all() and not packed


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize(
    "norm", [nn.Identity(), nn.Linear(16, 16, dtype=torch.float64), nn.Dropout(0.3), nn.GELU()], ids=str
)
@pytest.mark.parametrize("norm_first", [False, True])
def test_a_final_norm_of_ones_own_drops_as_padded(norm_first, norm, drops, packed):
    """A sum that no fused norm takes is dropped by PyTorch, by the shape that it has."""
    model, ids = small("masked", dtype=torch.float64, norm_first=norm_first, dropout=0.3 * drops), inputs("masked")
    model.encoder.norm = norm
    found = trained(model.train(), ids, tokens("masked", ids))
    assert bool(packed) is not (drops or isinstance(norm, nn.Dropout))
    expected = padded(lambda: trained(model, ids, tokens("masked", ids)))
    for name, tensor in expected.items():
        assert_same_in_float64(found[name], tensor, name)


def test_what_a_padded_target_may_see_of_the_memory_is_checked_alike(packed):
    model, (_, target) = small("translation"), inputs("translation")
    memory, of = torch.randn(3, 7, 16), tfk.Mask.lengths
    for lengths in ([3, 4, 8], [3, 4, -1], [3, 4]):
        with pytest.raises(ValueError, match="attention: mask's key_lengths must"):
            model.decode(target, memory, of(torch.tensor(lengths)))
    nothing = memory[:, :0]
    assert torch.equal(model.decode(target, nothing, None), padded(lambda: model.decode(target, nothing, None)))
    assert packed == []
    model.decode(target, memory, of(torch.tensor([0, 7, 3])))
    assert packed
