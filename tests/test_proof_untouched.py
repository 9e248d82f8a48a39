"""prove() runs copies: the user's model keeps its gradients and buffers, whatever its functions and objects hold."""

import copy
import weakref

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from tfm_kernels.bench import model as bench
from tfm_kernels.patching.copying import copied_apart

APART = "prove: a copy of Model runs parts of the model itself"


class Held:
    def __init__(self, layer):
        self.layer = layer


class Model(nn.Module):
    """A norm with statistics behind a fused one, called as the subclass has it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.statistics = nn.LayerNorm(8), nn.BatchNorm1d(8)

    def forward(self, x):
        return self.run(self.norm(x))


def through_an_object():
    model = Model()
    held = Held(model.statistics)
    model.run = lambda x: held.layer(x)
    return model


def by_its_parent():
    model = Model()
    model.run = Child(model)
    return model


class Child(nn.Module):
    def __init__(self, parent):
        super().__init__()
        self.parent = weakref.ref(parent)

    def forward(self, x):
        return self.parent().statistics(x)


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_copy_that_runs_the_models_own_layers_is_refused_before_it_writes(dtype, train, frozen):
    model = through_an_object().to(dtype).train(train).requires_grad_(not frozen)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = state(model)
    with pytest.raises(ValueError, match=APART):
        tfk.prove(model, torch.randn(5, 8, dtype=dtype))
    assert all((parameter.grad == 1).all() for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


TABLE = torch.randn(5, 8)


def test_a_table_of_many_models_may_be_read():
    model = Model().eval()
    model.register_buffer("table", TABLE)
    model.run = lambda x: x + TABLE
    report = tfk.prove(model, torch.randn(5, 8))
    assert report.passed, report.table()
    model.run = lambda x: TABLE.add_(x)
    before = TABLE.clone()
    with pytest.raises(ValueError, match=APART):
        tfk.prove(model, torch.randn(5, 8))
    assert torch.equal(TABLE, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_weak_reference_is_to_the_copys_part(dtype):
    model = by_its_parent().to(dtype).train()
    before = state(model)
    report = tfk.prove(model, torch.randn(5, 8, dtype=dtype))
    assert report.passed and "buffer of running_mean" in {row.tensor for row in report.rows}, report.table()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loss_that_reads_the_models_own_weights_is_told():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).double()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    with pytest.raises(ValueError, match="gradients reached parameters of the Sequential itself.*; loss_fn must not"):
        tfk.prove(model, torch.randn(5, 8).double(), loss_fn=lambda y: y.sum() + model[0].weight.square().sum())
    assert (model[0].weight.grad == 1).all() and model[1].weight.grad is None


def test_an_error_on_the_way_leaves_the_gradients():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).double()

    def loss_fn(y):
        with torch.enable_grad():
            model[0].weight.sum().backward()
        raise KeyError("no")

    with pytest.raises(KeyError):
        tfk.prove(model, torch.randn(5, 8).double(), loss_fn=loss_fn)
    assert model[0].weight.grad is None


@pytest.mark.parametrize("trained", [True, False])
def test_gradients_may_be_sparse(trained):
    model = nn.Sequential(nn.Embedding(9, 8, sparse=True), nn.LayerNorm(8))
    ids = torch.tensor([[1, 2, 2]])
    model(ids).square().sum().backward()
    before = model[0].weight.grad
    numbers = before.to_dense().clone()
    model[0].requires_grad_(trained)
    report = tfk.prove(model, ids)
    assert report.passed and trained is (("gradient", "0") in {(row.kind, row.module) for row in report.rows})
    assert model[0].weight.grad is before and torch.equal(before.to_dense(), numbers)


class Itself(nn.Linear):
    """Kept out of copies, as frozen teachers are."""

    def __deepcopy__(self, memo):
        return self


class ItsWeight(nn.Module):
    def __init__(self, weight=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8)) if weight is None else weight

    def __deepcopy__(self, memo):
        return ItsWeight(self.weight)

    def forward(self, x):
        return x * self.weight


class ItsBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.full((8,), 1.1))

    def __deepcopy__(self, memo):
        return copy.copy(self)

    def forward(self, x):
        return x * self.weight


@pytest.mark.parametrize("part", [Itself(8, 8), ItsWeight(), ItsBuffers()], ids=["module", "parameter", "buffers"])
@pytest.mark.parametrize("made", [tfk.prove, bench.compare], ids=["prove", "bench"])
def test_what_a_copy_would_share_is_refused_before_it_is_changed(made, part):
    model = nn.Sequential(nn.LayerNorm(8), part)
    with pytest.raises(ValueError, match=r"Sequential cannot be copied: 1(\.weight)? would be shared by the copy"):
        made(model, torch.randn(5, 8))
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    assert type(model[0]) is nn.LayerNorm and model(torch.randn(5, 8)).shape == (5, 8)


class Nothing(nn.ReLU):
    def __deepcopy__(self, memo):
        return self


class Viewed(nn.Sequential):
    """Gives new tensors whenever it is asked for its parameters."""

    def __init__(self):
        super().__init__(nn.Linear(8, 8))

    def named_parameters(self, *args, **kwargs):
        return ((name, value.view(-1)) for name, value in super().named_parameters(*args, **kwargs))


@pytest.mark.parametrize("model", [nn.Sequential(nn.LayerNorm(8), Nothing()), Viewed()], ids=["holds nothing", "views"])
def test_what_a_copy_cannot_change_may_be_handed_on(model):
    for _ in range(5):
        assert copied_apart(model)[0] is not model[0]


def test_a_gradient_of_inference_mode_is_kept():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    with torch.inference_mode():
        model[1].weight.grad = kept = torch.randn(8)
    assert tfk.prove(model, torch.randn(5, 8)).passed and model[1].weight.grad is kept
