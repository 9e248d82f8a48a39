"""Every model against the same one on torch.nn; padding, the future, sharing, configurations."""

import dataclasses
import warnings

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from tests.models.peers import KINDS, VT, Peer, V, inputs, small, tokens
from tfm_kernels.models import padding
from tfm_kernels.testing.float64 import assert_same_in_float64

CASES = [
    {},
    {"norm_first": True},
    {"final_norm": True, "activation": "gelu", "positions": "learned"},
    {"norm_first": True, "final_norm": False, "bias": False},
]
PATTERNS = [[1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 0], [0, 1, 0, 1, 0, 1], [0, 0, 0, 1, 1, 1]]


def gradients(model, ids, select):
    model.zero_grad()
    y = model(*ids)[select]
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
    return {"output": y.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize("changes", CASES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["reference", "aten", "cpu"])
def test_is_the_same_model_on_torch_nn(kind, changes, backend):
    model = small(kind, dtype=torch.float64, backend=backend, **changes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = Peer(model).eval()
    ids = inputs(kind)
    found, expected = (gradients(m, ids, tokens(kind, ids)) for m in (model, peer))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_in_float64(found[name], tensor, name)


@pytest.mark.parametrize("norm_first", [False, True])
def test_weights_go_to_torch_nn_transformer_and_back(norm_first):
    model = small("translation", norm_first=norm_first, final_norm=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's stacks warn that they cannot nest tensors
        theirs = nn.Transformer(16, 4, 2, 2, 24, batch_first=True, norm_first=norm_first)
    theirs.load_state_dict(model.transformer.state_dict(), strict=True)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(1.5)
    model.transformer.load_state_dict(theirs.state_dict(), strict=True)
    for name, parameter in model.transformer.named_parameters():
        assert torch.equal(parameter, theirs.get_parameter(name)), name
    assert list(model.transformer.state_dict()) == list(theirs.state_dict())


def test_final_norm_follows_norm_first_unless_said():
    for kind in KINDS:
        for changes, expected in (({}, False), ({"norm_first": True}, True), ({"final_norm": True}, True)):
            model = small(kind, **changes)
            stacks = (
                [model.transformer.encoder, model.transformer.decoder] if kind == "translation" else [model.encoder]
            )
            assert [stack.norm is not None for stack in stacks] == [expected] * len(stacks)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_anywhere_changes_nothing(kind, norm_first, positions, monkeypatch):
    """A row gives at its tokens what it gives alone, wherever its padding stands, looked at or not.

    Looked at or not, a row that is padded on the right gives the same at its padding, too.
    """
    model = small(kind, dtype=torch.float64, norm_first=norm_first, positions=positions)
    keep = torch.tensor(PATTERNS, dtype=torch.bool)
    rows = [torch.randint(1, VT, (int(pattern.sum()),)) for pattern in keep]
    padded = torch.zeros(keep.shape, dtype=torch.long)
    padded[keep] = torch.cat(rows)
    count = len(inputs(kind))
    alone = [model(*[row[None]] * count)[0] for row in rows]
    together, right = model(*[padded] * count), model(*[padded[:1]] * count)
    monkeypatch.setattr(padding, "readable", lambda ids: False)
    unseen = model(*[padded] * count)
    for b, expected in enumerate(alone):
        for found in (together, unseen):
            assert_same_in_float64(found[b] if kind == "classifier" else found[b][keep[b]], expected)
    assert_same_in_float64(unseen[:1], right)


@pytest.mark.parametrize("kind", KINDS)
def test_the_values_of_padding_are_never_read(kind):
    """Another embedding of padding reaches no token and no gradient."""
    model = small(kind)
    ids = inputs(kind)
    expected = gradients(model, ids, tokens(kind, ids))
    parts = [model.embedding] + ([model.source_embedding] if kind == "translation" else [])
    with torch.no_grad():
        for part in parts:
            part.tokens.weight[0] = 7.5
    found = gradients(model, ids, tokens(kind, ids))
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", ["translation", "causal"])
def test_the_future_is_not_seen(kind, norm_first):
    model = small(kind, norm_first=norm_first)
    ids = inputs(kind, (6, 6, 6), (6, 6, 6))
    before = model(*ids)
    for t in range(1, 6):
        changed = [*ids[:-1], ids[-1].clone()]
        changed[-1][:, t:] = changed[-1][:, t:] % (VT - 1) + 1
        after = model(*changed)
        assert torch.equal(after[:, :t], before[:, :t])
        assert not torch.allclose(after[:, t:], before[:, t:], atol=1e-3)


def test_a_masked_language_model_and_a_classifier_see_both_sides():
    for kind in ("masked", "classifier"):
        model, ids = small(kind), inputs(kind, (6,))[0]
        changed = ids.clone()
        changed[0, -1] = ids[0, -1] % (V - 1) + 1
        first = 0 if kind == "masked" else slice(None)
        assert not torch.allclose(model(changed)[0, first], model(ids)[0, first], atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_shapes(kind):
    model, ids = small(kind), inputs(kind)
    expected = {"translation": (3, 6, VT), "classifier": (3, 3), "masked": (3, 7, V), "causal": (3, 7, V)}[kind]
    assert model(*ids).shape == expected
    assert model.features(*ids).shape == (*expected[:-1], 16)


def test_pooling():
    for pooling in ("mean", "first"):
        model = small("classifier", dtype=torch.float64, pooling=pooling)
        ids = inputs("classifier")
        assert_same_in_float64(model(*ids), Peer(model).eval()(*ids))
        assert_same_in_float64(model(torch.tensor([[0, 5, 6, 7]])), model(torch.tensor([[5, 6, 7]])))
    empty = torch.tensor([[3, 4], [0, 0]])
    for pooling in ("mean", "first"):
        model = small("classifier", pooling=pooling)
        assert torch.equal(model.features(empty)[1], torch.zeros(16)) and model(empty).isfinite().all()


def test_the_mean_of_a_long_text_does_not_overflow():
    """Its sum is more than float16 holds, and its count has more digits; padding changes nothing."""
    model = small("classifier", max_length=2400).half()
    with torch.no_grad():
        for layer in model.encoder.layers:
            layer.norm2.bias.fill_(30.0)
    ids = torch.randint(1, V, (1, 2303))
    alone, padded = model.features(ids), model.features(torch.nn.functional.pad(ids, (0, 1)))
    assert padded.dtype == torch.float16
    torch.testing.assert_close(padded, alone, rtol=2**-10, atol=0)


@pytest.mark.parametrize("kind", ["translation", "masked", "causal"])
def test_shared_embeddings_are_one_parameter(kind):
    model = small(kind, dtype=torch.float64, share_embeddings=True)
    ids = inputs(kind)
    found, expected = (gradients(m, ids, tokens(kind, ids)) for m in (model, Peer(model).eval()))
    for name, tensor in expected.items():
        assert_same_in_float64(found[name], tensor, name)
    for m in (model, model.float(), model.double()):
        weights = [m.output.weight, m.embedding.tokens.weight]
        weights += [m.source_embedding.tokens.weight] if kind == "translation" else []
        assert all(weight is weights[0] for weight in weights)
        assert sum(p is weights[0] for p in m.parameters()) == 1
    unshared = small(kind)
    assert unshared.output.weight is not unshared.embedding.tokens.weight


def test_no_padding_token():
    """With pad_id None token 0 is a token like all others."""
    model = small("causal", pad_id=None)
    ids = torch.tensor([[0, 3, 0, 5]])
    changed = torch.tensor([[2, 3, 0, 5]])
    assert model.embedding.tokens.padding_idx is None
    assert not torch.allclose(model(ids)[0, 3], model(changed)[0, 3], atol=1e-4)


def test_layers_do_not_share_weights():
    for kind in KINDS:
        model = small(kind)
        pointers = [p.data_ptr() for p in model.parameters()]
        assert len(set(pointers)) == len(pointers)


def test_start_is_xaviers():
    model = tfk.models.TranslationTransformer(tfk.models.TranslationConfig(50, 60, 64, 4, 2, 2))
    for name, parameter in model.transformer.named_parameters():
        if parameter.dim() > 1:
            bound = (6 / sum(parameter.shape)) ** 0.5
            assert parameter.abs().max() <= bound and abs(parameter.std() - bound / 3**0.5) < 0.05 * bound, name
    assert not model.output.bias.any()
    assert abs(model.embedding.tokens.weight[1:].std() - 64**-0.5) < 0.01
    assert not model.embedding.tokens.weight[0].any()


def test_a_translations_sizes_by_position():
    """Widths before depths; no other field goes by position, and all have the defaults of the other models."""
    given = (100, 90, 64, 4, 3, 2, 128, 0.2, "gelu", True, 70, False, None)
    names = "source_vocab target_vocab d_model nhead num_encoder_layers num_decoder_layers dim_feedforward dropout "
    names += "activation norm_first max_length share_embeddings pad_id"
    config = tfk.models.TranslationConfig(*given)
    assert config == tfk.models.TranslationConfig(**dict(zip(names.split(), given, strict=True)))
    assert tuple(getattr(config, name) for name in names.split()) == given
    assert dataclasses.replace(config, bias=False, nhead=8).nhead == 8
    with pytest.raises(TypeError, match="positional arguments"):
        tfk.models.TranslationConfig(*given, True)
    shared = dataclasses.asdict(tfk.models.CausalLanguageConfig(10))
    found = dataclasses.asdict(tfk.models.TranslationConfig(10, 10))
    assert {name: found[name] for name in shared.keys() & found.keys()}.items() <= shared.items()


def test_defaults_are_the_papers():
    config = tfk.models.TranslationConfig(10, 11)
    found = dataclasses.asdict(config)
    assert {name: found[name] for name in ("d_model", "nhead", "dim_feedforward", "dropout", "max_length")} == {
        "d_model": 512, "nhead": 8, "dim_feedforward": 2048, "dropout": 0.1, "max_length": 5000,
    }  # fmt: skip
    assert config.num_encoder_layers == config.num_decoder_layers == 6
    assert tfk.models.TranslationConfig(**found) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.d_model = 4
