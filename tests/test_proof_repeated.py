"""prove() calls the patched model several times, with a graph and without: what one call leaves behind fails."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tfm_kernels.proof import prove_patched

CACHE, BITS, MEMORY = "output, no_grad", "a second call with the same inputs", "a later call changes it"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.dropout = nn.Linear(32, 32), nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.linear(x))


class Workspace(Model):
    """Gives its results in memory that it keeps."""

    kept = None

    def forward(self, x):
        y = super().forward(x)
        if torch.is_grad_enabled():
            return y
        if self.kept is None:
            self.kept = torch.empty_like(y)
        return self.kept.copy_(y)


class Stale(Model):
    """Keeps what it computed of the first inputs of a shape."""

    kept = None

    def forward(self, x):
        if torch.is_grad_enabled():
            return super().forward(x)
        if self.kept is None or self.kept.shape != x.shape:
            self.kept = super().forward(x)
        return self.kept.clone()


class Alternating(Model):
    """Sums in another order at every second call: each is as good as the other."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls % 2:
            return super().forward(x)
        return self.dropout(F.linear(x.flip(-1), self.linear.weight.flip(-1), self.linear.bias))


class Counting(Model):
    """Grows with every call."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1.0 + 2.0**-20) ** self.calls


class NoDropout(Model):
    def forward(self, x):
        return super().forward(x) if torch.is_grad_enabled() else self.linear(x)


class WrongScale(Model):
    def forward(self, x):
        return super().forward(x) * (1.0 if torch.is_grad_enabled() else 1.001)


class Honest(Model):
    """Keeps something, and asks whether it is still right."""

    kept = None

    def forward(self, x):
        if self.kept is None or not torch.equal(self.kept[0], x):
            self.kept = x.clone(), self.linear.weight.detach().clone()
        return super().forward(x)


def inputs(*shape):
    return torch.randn(*shape or (6, 9, 32), generator=torch.Generator().manual_seed(1))


def prove(cls, given=None, original=Model, train=False, **kwargs):
    given = inputs() if given is None else given
    return prove_patched(original().train(train), given, patch=lambda model: setattr(model, "__class__", cls), **kwargs)


@pytest.mark.parametrize("shape", [(6, 9, 32), (1, 9, 32), (9, 32), (1, 32)], ids=str)
@pytest.mark.parametrize(
    ("cls", "told"), [(Workspace, MEMORY), (Stale, CACHE), (Alternating, BITS), (Counting, BITS)], ids=str
)
def test_what_a_call_leaves_behind_fails(cls, told, shape):
    report = prove(cls, inputs(*shape))
    assert any(told in str(row) for row in report.failures), report.table()
    assert prove(Honest, inputs(*shape)).passed


@pytest.mark.parametrize("cls", [Workspace, Stale, NoDropout, WrongScale])
def test_training_mode_without_a_graph(cls):
    """No bits are compared there, but memory and values are."""
    report = prove(cls, train=True)
    assert report.failures and all("no_grad" in str(row) or MEMORY in str(row) for row in report.failures)
    assert prove(Honest, train=True).passed


@pytest.mark.parametrize(("cls", "train"), [(NoDropout, False), (Alternating, True)])
def test_what_fails_in_the_other_mode_alone_passes(cls, train):
    assert prove(cls, train=train).passed


@pytest.mark.parametrize("original", [Workspace, Alternating])
def test_what_the_original_leaves_behind_is_no_failure(original):
    assert prove(type("Patched", (original,), {}), original=original).passed
    report = prove(Stale, original=original)
    assert any(CACHE in str(row) for row in report.failures)


def test_a_model_that_refuses_other_inputs_is_proven():
    class Picky(Model):
        def forward(self, x):
            if not torch.equal(x.float(), inputs()):
                raise ValueError("not these")
            return super().forward(x)

    class Patched(Picky):
        pass

    report = prove(Patched, original=Picky)
    assert report.passed and any("called again" in row.tensor for row in report.rows)

    class Remembering(Picky, Alternating):
        pass

    assert not prove(Remembering, original=Picky).passed


def test_an_output_in_the_memory_of_a_buffer_is_compared():
    class Buffered(Model):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(32))

        def forward(self, x):
            return super().forward(x), self.seen.add_(x.mean((0, 1)))

    class Wrong(Buffered):
        def forward(self, x):
            y, seen = super().forward(x)
            return y, seen.mul_(2.0)

    class Right(Buffered):
        pass

    assert prove(Right, original=Buffered).passed
    report = prove(Wrong, original=Buffered)
    assert {"output.1", "output.1, no_grad"} <= {row.tensor for row in report.failures}


@pytest.mark.parametrize("train", [False, True])
def test_how_often_each_model_is_called(train):
    """The cost: float64 once for all inputs and once with gradients, the original once; then each module alone."""
    calls = Counter()

    class Counted(Model):
        def forward(self, x):
            calls[type(self).__name__, str(x.dtype)[6:], torch.is_grad_enabled()] += 1
            return super().forward(x)

    class Patched(Counted):
        pass

    def patch(model):
        model.__class__ = Patched
        model.linear.__class__ = type("Other", (nn.Linear,), {})

    assert prove_patched(Counted().train(train), inputs(), patch=patch).passed
    whole, alone = 1, 1  # the model is a replaced module itself, and so fed alone, too
    assert calls == {
        ("Counted", "float64", False): 1,
        ("Counted", "float64", True): whole + alone,
        ("Counted", "float32", True): whole + alone,
        ("Patched", "float32", False): 2 if train else 3,
        ("Patched", "float32", True): whole + alone,
    }
