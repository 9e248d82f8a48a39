"""prove(): everything that a model gives is compared, and where nothing is, nothing passes."""

import dataclasses
import math
from collections import namedtuple

import pytest
import torch
from torch import nn

from tfm_kernels.proof import prove_patched
from tfm_kernels.proof.runs import Call


class Linear(nn.Module):
    """A model whose forward a test replaces."""

    def __init__(self, give=lambda y: y):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.give = give

    def forward(self, x):
        return self.give(self.linear(x))


def prove(model, forward, inputs=None, **kwargs):
    """The report on a model whose patch is another forward(model, x)."""
    inputs = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)) if inputs is None else inputs

    def patch(patched):
        patched.forward = lambda *args, **kwargs: forward(patched, *args, **kwargs)

    return prove_patched(model, inputs, patch=patch, **kwargs)


def same(model, x):
    return type(model).forward(model, x)


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    state: object = None


Pair = namedtuple("Pair", "first second")

CONTAINERS = {
    "dataclass": lambda y: Output(y),
    "dataclass within": lambda y: {"out": [Output(y.detach() * 0.0, (y,))]},
    "named tuple": lambda y: Pair(None, y),
    "dict and tuple": lambda y: {"a": ({"b": y},)},
    "complex": lambda y: torch.complex(y.float(), y.float()),
    "Python's number": lambda y: y.sum().item(),
    "integers": lambda y: y.argmax(-1),
    "Python's integer": lambda y: (y > 0.0).sum().item(),
    "bool": lambda y: (y > 0.0, None),
}


@pytest.mark.parametrize("give", CONTAINERS.values(), ids=CONTAINERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_of_every_kind_are_compared(give, dtype):
    report = prove(Linear(give).eval(), same, dtype=dtype)
    assert report.passed and any(row.kind == "output" for row in report.rows), report.table()
    report = prove(Linear(give).eval(), lambda model, x: give(0.0 * model.linear(x)), dtype=dtype)
    assert any(row.kind == "output" and not row.passed for row in report.rows), report.table()


def test_one_wrong_integer_fails_and_is_counted():
    give = lambda y: {"y": y, "ids": y.argmax(-1)}
    flip = lambda y: {"y": y, "ids": torch.cat([y[:-1].argmax(-1), (y[-1:].argmax(-1) + 1) % 8])}
    report = prove(Linear(give), lambda model, x: flip(model.linear(x)))
    told = "1 of 6 elements differ from PyTorch's"
    assert {str(row) for row in report.failures} == {f"output.ids: {told}", f"output.ids, no_grad: {told}"}


class Cache:
    pass


def test_what_cannot_be_compared_is_named():
    give = lambda y: Output(y, Cache())
    report = prove(Linear(give), same)
    assert report.passed and "output.state is of type Cache, which is not compared" in report.notes


@pytest.mark.parametrize(
    ("give", "dtype", "message"),
    [
        (lambda y: Cache(), None, "output is of type Cache"),
        (lambda y: None, None, "it gives no tensor"),
        (lambda y: (y * 6e4) * 6e4 * 6e4, torch.float16, "output is NaN or infinite in PyTorch"),
        (lambda y: y[:0], None, "output is empty"),
    ],
    ids=["unknown type", "nothing", "overflow", "empty"],
)
def test_where_nothing_is_compared_nothing_passes(give, dtype, message):
    with pytest.raises(ValueError, match=f"prove: no output of Linear can be compared: {message}"):
        prove(Linear(give).eval(), same, dtype=dtype, loss_fn=lambda out: torch.zeros((), requires_grad=True))


def test_outputs_that_are_zero_are_compared():
    assert prove(Linear(lambda y: y * 0.0), same).passed


HIDDEN = torch.tensor([0, 0, 0, 1, 1, 1, 0, 0], dtype=torch.bool)


@pytest.mark.parametrize("value", [1e3, torch.inf, torch.nan], ids=str)
def test_what_is_infinite_in_pytorch_must_be_infinite(value):
    report = prove(
        Linear(lambda y: y.masked_fill(HIDDEN, -torch.inf)),
        lambda model, x: model.linear(x).masked_fill(HIDDEN, value),
        loss_fn=lambda y: y[:, :3].sum(),
    )
    told = "18 elements are not the infinity that PyTorch gives"
    assert {str(row) for row in report.failures} == {f"output: {told}", f"output, no_grad: {told}"}
    assert prove(Linear(lambda y: y.masked_fill(HIDDEN, value)), same, loss_fn=lambda y: y[:, :3].sum()).passed


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(self.first(x).detach())


def test_a_gradient_that_pytorch_does_not_give_fails():
    report = prove(TwoLayers(), lambda model, x: model.second(model.first(x)))
    wrong = {str(row) for row in report.failures if row.kind == "gradient"}
    assert wrong == {f"first: gradient of {name}: PyTorch gives none" for name in ("weight", "bias")}
    assert any(row.kind == "module" and "gradient of input.0" in row.tensor for row in report.failures)


class Running(nn.Module):
    """Normalises by statistics that its calls gather, and counts them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("scale", torch.ones(1).expand(8))

    def forward(self, x):
        self.calls = self.calls + 1.0
        return self.linear(self.norm(x)) * self.calls * self.scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_buffers_are_the_same_before_each_run(dtype):
    report = prove(Running(), same, dtype=dtype, count=2)
    assert report.passed, report.table()
    told = {(row.module, row.tensor) for row in report.rows if row.kind == "buffer"}
    wanted = {("norm", "running_mean"), ("norm", "running_var"), ("norm", "num_batches_tracked"), ("", "calls")}
    assert told == {(module, f"buffer of {name}") for module, name in wanted}


def test_statistics_that_are_not_gathered_fail():
    def forward(model, x):
        model.calls += 1.0
        norm = model.norm
        return model.linear(nn.functional.batch_norm(x, None, None, norm.weight, norm.bias, True, 0.1, norm.eps))

    report = prove(Running(), forward)
    wrong = {(row.kind, row.module, row.tensor) for row in report.failures if row.kind != "module"}
    gathered = ("running_mean", "running_var", "num_batches_tracked")
    assert wrong == {("buffer", "norm", f"buffer of {name}") for name in gathered}
    assert "3 buffers" not in str(report) and "4 buffers" in str(report)


def test_a_buffer_that_only_the_patched_model_changes_fails():
    def forward(model, x):
        y = same(model, x)
        model.scale = torch.zeros(8)
        return y

    report = prove(Running(), forward)
    assert {row.tensor for row in report.failures if row.kind == "buffer"} == {"buffer of scale"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_finite_in_float64_stays_so_in_the_models_dtype(dtype):
    """A mask of the least float64, recorded for a module alone, must not hide whole rows by -inf."""
    least = torch.finfo(torch.float64).min
    given = torch.tensor([least, -math.inf, -math.nan, 1.5, -least, math.inf], dtype=torch.float64)
    (mask,) = Call((given,), {}).to(dtype).args
    most = torch.finfo(dtype).max
    wanted = torch.tensor([-most, -math.inf, math.nan, 1.5, most, math.inf], dtype=dtype)
    torch.testing.assert_close(mask, wanted, rtol=0, atol=0, equal_nan=True)
