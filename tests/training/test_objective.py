"""Objective: the loss that logits would give, and every gradient; who is called as a whole; what is in memory."""

import copy

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from tests.models.peers import KINDS, VT, inputs, small
from tests.nn.test_honesty import LoRA
from tests.peak import growth
from tests.training import toy
from tfm_kernels import training
from tfm_kernels.nn import loss as fused_file
from tfm_kernels.testing.float64 import assert_same_in_float64
from tfm_kernels.training.loss import IGNORED, counted, cross_entropy

BACKENDS = ["reference", "aten", "cpu"]
TOKEN_MODELS = ("masked", "causal", "translation")


@pytest.fixture
def fused(monkeypatch):
    """The backends that ops.linear_cross_entropy was asked for, and the rows it was given."""
    calls, original = [], tfk.ops.linear_cross_entropy

    def linear_cross_entropy(x, *arguments, **options):
        calls.append((options["backend"], len(x)))
        return original(x, *arguments, **options)

    monkeypatch.setattr(fused_file.ops, "linear_cross_entropy", linear_cross_entropy)
    return calls


def aims(ids, share, classes=VT):
    """Targets: of every token, of a share of them, or of none; never of padding."""
    random = torch.Generator().manual_seed(3)
    targets = torch.randint(classes, ids.shape, generator=random)
    chosen = torch.rand(ids.shape, generator=random) < share
    return targets.masked_fill(~chosen | (ids == 0), IGNORED)


def with_gradients(model, loss):
    """What a backward pass leaves; a parameter that takes no part has no gradient, which DDP would wait for."""
    model.zero_grad()
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None for gradient in found.values())
    return {"loss": loss.detach(), **found}


def assert_is_the_loss_of_the_logits(model, ids, targets, smoothing=0.1, backend=None):
    objective = training.Objective(model, smoothing=smoothing, backend=backend)
    found = with_gradients(model, objective(tuple(ids), targets))
    expected = with_gradients(model, cross_entropy(model(*ids), targets, smoothing=smoothing))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_in_float64(found[name], tensor, name)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", TOKEN_MODELS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("share_embeddings", [False, True])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_loss_and_gradients_are_those_of_the_logits(fused, backend, kind, smoothing, share_embeddings, share):
    model = small(kind, dtype=torch.float64, backend=backend, share_embeddings=share_embeddings)
    ids = inputs(kind)
    targets = aims(ids[-1], share)
    assert 0 < counted(targets) < targets.numel() and (ids[-1] == 0).any()
    assert_is_the_loss_of_the_logits(model, ids, targets, smoothing, backend)
    assert fused == [(backend, counted(targets))]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", TOKEN_MODELS)
def test_no_padding_and_a_target_everywhere(fused, backend, kind):
    model = small(kind, dtype=torch.float64, backend=backend, norm_first=True)
    ids = inputs(kind, (5, 5), (5, 5))
    assert_is_the_loss_of_the_logits(model, ids, aims(ids[-1], 1.0), backend=backend)
    assert fused == [(backend, 10)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", TOKEN_MODELS)
def test_where_nothing_counts_all_gradients_are_zero(fused, backend, kind):
    model = small(kind, dtype=torch.float64, backend=backend)
    ids = inputs(kind)
    found = assert_is_the_loss_of_the_logits(model, ids, aims(ids[-1], 0.0), backend=backend)
    assert not any(tensor.any() for tensor in found.values())
    assert fused == [(backend, 0)]


@pytest.fixture
def picked(monkeypatch):
    """The shapes (B, C) of the places that the masked model's encoder was asked for."""
    shapes, original = [], tfk.nn.TransformerEncoder.forward_at

    def forward_at(self, src, places, *masks):
        shapes.append(tuple(places.shape))
        return original(self, src, places, *masks)

    monkeypatch.setattr(tfk.nn.TransformerEncoder, "forward_at", forward_at)
    return shapes


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(
    "counts, shape", [((1, 2, 3), (3, 3)), ((0, 1, 0), (3, 1)), ((0, 0, 0), None), ((1, 4, 2), None)]
)
def test_the_last_layer_of_a_masked_model_where_targets_are_few(fused, picked, backend, norm_first, counts, shape):
    """Up to half of the columns; rows with fewer targets, or none, among them."""
    model = small("masked", dtype=torch.float64, backend=backend, norm_first=norm_first, share_embeddings=True)
    ids = inputs("masked")
    targets = torch.full_like(ids[0], IGNORED)
    for row, count in enumerate(counts):
        targets[row, torch.randperm(4, generator=torch.Generator().manual_seed(row))[:count]] = row + 1
    assert_is_the_loss_of_the_logits(model, ids, targets, backend=backend)
    assert picked == ([shape] if shape else []) and fused == [(backend, sum(counts))]


@pytest.mark.parametrize("change", ["features", "encoder"])
def test_a_masked_model_with_parts_of_ones_own_is_not_asked_for_places(picked, change):
    class Own(tfk.models.MaskedLanguageModel):
        def features(self, ids):
            return 2 * super().features(ids)

    class Encoder(nn.Module):
        def forward(self, x, mask):
            return x.tanh()

    model, ids = small("masked", dtype=torch.float64), inputs("masked")
    if change == "features":
        model.__class__ = Own
    else:
        model.encoder = Encoder()
    targets = torch.full_like(ids[0], IGNORED)
    targets[:, 0] = 3
    assert_is_the_loss_of_the_logits(model, ids, targets)
    assert not picked


def test_a_masked_model_that_sees_a_part_is_trained_as_it_is_run():
    model, ids = small("masked", dtype=torch.float64), inputs("masked")
    model.sight = tfk.Mask.window(1, 0)
    targets = torch.full_like(ids[0], IGNORED)
    targets[:, 1] = 3
    assert_is_the_loss_of_the_logits(model, ids, targets)


class Doubled(tfk.models.CausalLanguageModel):
    def forward(self, ids):
        return 2 * super().forward(ids)


class OtherFeatures(tfk.models.CausalLanguageModel):
    def features(self, ids):
        return 2 * super().features(ids)


def test_a_forward_of_ones_own_is_called(fused):
    """Of a subclass, of the instance; features of one's own are taken, as forward takes them."""
    model, ids = small("causal", dtype=torch.float64), inputs("causal")
    targets = aims(ids[0], 0.5)
    plain = training.Objective(model)(tuple(ids), targets)
    assert len(fused) == 1
    model.forward = lambda ids, forward=model.forward: 2 * forward(ids)
    bent = copy.deepcopy(small("causal", dtype=torch.float64))
    bent.__class__ = Doubled
    for other in (model, bent):
        assert assert_is_the_loss_of_the_logits(other, ids, targets)["loss"] != plain
    assert len(fused) == 1
    bent.__class__ = OtherFeatures
    assert_is_the_loss_of_the_logits(bent, ids, targets)
    assert len(fused) == 2


@pytest.mark.parametrize("place", ["", "output"])
@pytest.mark.parametrize("hook", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_hooks_see_what_they_saw(fused, hook, place):
    model, ids = small("masked", dtype=torch.float64), inputs("masked")
    seen = []
    getattr(model.get_submodule(place), f"register_{hook}_hook")(lambda *given: seen.append(1))
    training.Objective(model)(tuple(ids), aims(ids[0], 0.5)).backward()
    assert seen == [1] and not fused


def test_other_output_layers_are_called(fused):
    """An adapter, a parametrized weight, a quantized one."""
    for change in (LoRA, nn.utils.parametrizations.weight_norm):
        model, ids = small("causal", dtype=torch.float64), inputs("causal")
        model.output = change(model.output)
        assert_is_the_loss_of_the_logits(model, ids, aims(ids[0], 0.5))
    assert not fused
    model, ids = small("causal"), inputs("causal")
    tfk.quantize(model, "int8_weight_only")
    assert isinstance(model.output, tfk.nn.Int8Linear)
    with torch.no_grad():
        found = training.Objective(model)(tuple(ids), aims(ids[0], 0.5))
        assert torch.equal(found, cross_entropy(model(*ids), aims(ids[0], 0.5)))
    assert not fused


def test_any_module_that_gives_logits_will_do(fused):
    model = small("classifier", dtype=torch.float64)
    assert_is_the_loss_of_the_logits(model, inputs("classifier"), torch.tensor([2, IGNORED, 0]))
    data, size = toy.examples()
    ids, targets = data.batch(range(4), 0)
    assert_is_the_loss_of_the_logits(toy.Toy(size, 0.0).double(), ids, targets)
    assert not fused


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_the_models(kind):
    """Those of counted targets at least, and of nothing else that counts."""
    model, ids = small(kind, dtype=torch.float64), inputs(kind)
    targets = torch.tensor([2, IGNORED, 0]) if kind == "classifier" else aims(ids[-1], 0.4)
    logits, their = training.Objective(model, smoothing=0.5).scores(tuple(ids), targets)
    assert logits.shape[:-1] == their.shape
    wanted = targets != IGNORED
    assert torch.equal(their[their != IGNORED], targets[wanted])
    assert_same_in_float64(logits[their != IGNORED], model(*ids)[wanted])
    assert logits.dim() == 2  # no batch of logits for a token model


@pytest.mark.parametrize("kind", TOKEN_MODELS)
def test_targets_that_do_not_fit_are_refused(kind):
    model, ids = small(kind), inputs(kind)
    targets = aims(ids[-1], 1.0)
    words = r"^Objective: targets must have shape \(3, \d\) to match the model's features \(3, \d, 16\), got \(3, \d\)$"
    with pytest.raises(ValueError, match=words):
        training.Objective(model)(tuple(ids), targets[:, :-1])
    targets[0, 0] = 999
    with pytest.raises(ValueError, match=r"target must lie in \[0, \d+\) or be ignore_index -100, got 999"):
        training.Objective(model)(tuple(ids), targets)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", TOKEN_MODELS)
def test_autocast_is_as_exact_as_with_logits(fused, kind, dtype):
    model, ids = small(kind, norm_first=True), inputs(kind)
    targets = aims(ids[-1], 0.5)
    whole = copy.deepcopy(model).double()
    exact = with_gradients(whole, cross_entropy(whole(*ids), targets))
    with torch.autocast("cpu", dtype=dtype):
        loss = training.Objective(model, backend="cpu")(tuple(ids), targets)
        expected_loss = cross_entropy(model(*ids), targets)
    assert loss.dtype == torch.float32 and fused == [("cpu", counted(targets))]
    found, expected = (with_gradients(model, value) for value in (loss, expected_loss))
    assert all(found[name].dtype == torch.float32 for name in found)
    wrong = [torch.cat([(one[n] - exact[n]).flatten() for n in exact]).norm() for one in (found, expected)]
    assert wrong[0] <= 2 * wrong[1]


class Unbroken(nn.Module):
    """The model behind a module that is called, so that its logits are taken."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *ids):
        return self.model(*ids)


def test_a_validation_has_the_numbers_of_the_logits():
    data, size = toy.masked()
    model = toy.masked_model(size, 0.0).double()
    found, expected = (training.evaluate(m, data, toy.CONFIG) for m in (model, Unbroken(model)))
    assert 0.0 < expected["validation_accuracy"] == found["validation_accuracy"]
    loss = [torch.tensor(one["validation_loss"], dtype=torch.float64) for one in (found, expected)]
    assert_same_in_float64(*loss)


STEP = """
sizes = dict(d_model=16, nhead=2, dim_feedforward=16, max_length=400, dropout=0.0)
config = tfk.models.{kind}LanguageConfig(20000, 1, **sizes)
model = tfk.models.{kind}LanguageModel(config)
random = torch.Generator().manual_seed(0)
def batch(rows):
    ids = torch.randint(1, 20000, (rows, 400), generator=random)
    return ids, ids.masked_fill(torch.rand(ids.shape, generator=random) >= {share}, -100)
from tfm_kernels.training import Objective, cross_entropy
def fused(ids, targets):
    Objective(model, smoothing=0.1, backend="cpu")((ids,), targets).backward()
def logits(ids, targets):
    cross_entropy(model(ids), targets, smoothing=0.1).backward()
{way}(*batch(1))
"""


@pytest.mark.parametrize("kind, share", [("Masked", 0.15), ("Causal", 1.0)])
def test_a_training_step_holds_no_logits(kind, share):
    """Of 12,000 places: 916 MiB for all of them, 137 for 15 %; 64 for a block, and 64 for its gradient."""
    before = STEP.format(kind=kind, share=share, way="fused")
    assert growth(before, "fused(*batch(30))") < 200


def test_logits_that_are_held_are_seen():
    """2,000 places: 153 MiB, and as much for the gradient, the softmax, and the smoothing."""
    before = STEP.format(kind="Masked", share=0.15, way="logits")
    assert growth(before, "logits(*batch(5))") > 300
