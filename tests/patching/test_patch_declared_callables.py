"""Declared classes that hold callables, generators and cached properties: what a forward does with them is not lost."""

import functools
import itertools
import random
import threading
from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfm_kernels as tfk

WIDTH = 32


class FeedForward(nn.Module):
    def __init__(self, held=None):
        super().__init__()
        self.a, self.b, self.held = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), held

    def forward(self, x):
        return self.b(F.gelu(self.a(x)))


class Tells(FeedForward):
    def forward(self, x):
        for tell in self.held if isinstance(self.held, list) else [self.held]:
            tell(float(x.detach().abs().mean()))
        return super().forward(x)


class Asks(FeedForward):
    def forward(self, x):
        return self.b(F.gelu(self.a(x), **self.held()))


class Looks(FeedForward):
    def forward(self, x):
        return self.b(F.gelu(self.a(x), **self.held["options"]()))


class Drops(FeedForward):
    def forward(self, x):
        return torch.zeros_like(x) if self.training and self.held.random() < 0.1 else super().forward(x)


class Counts(FeedForward):
    def forward(self, x):
        next(self.held)
        return super().forward(x)


class Caches(FeedForward):
    @functools.cached_property
    def norms(self):
        return []

    def forward(self, x):
        self.norms.append(float(x.detach().norm()))
        return super().forward(x)


class CachesInTraining(Caches):
    def forward(self, x):
        return super().forward(x) if self.training else FeedForward.forward(self, x)


class Reads(FeedForward):
    @functools.cached_property
    def scale(self):
        return 1.0

    def forward(self, x):
        return super().forward(x * self.scale)


class CountsInItsClass(FeedForward):
    calls, seen = 0, []

    def forward(self, x):
        type(self).calls += 1
        return super().forward(x)


class NotesInItsClass(CountsInItsClass):
    def forward(self, x):
        self.seen.append(len(x))
        return FeedForward.forward(self, x)


class NotesItsMode(FeedForward):
    def train(self, mode=True):
        self.mode = "training" if mode else "evaluation"
        return super().train(mode)


for cls in (
    Tells,
    Asks,
    Looks,
    Drops,
    Counts,
    Caches,
    CachesInTraining,
    Reads,
    CountsInItsClass,
    NotesInItsClass,
    NotesItsMode,
):
    tfk.patching.declare_feed_forward(cls, first="a", second="b", activation="gelu")


class Monitor:
    def __init__(self):
        self.seen = []

    def record(self, value):
        self.seen.append(value)

    __call__ = record


def _closure(seen):
    return lambda value: seen.append(value)


def _append(seen, value):
    seen.append(value)


def _closure_of(function):
    return lambda value: function(value)


LOG = []


def _note(value):
    LOG.append(value)


CALLABLES = {
    "a list's append": (lambda monitor: monitor.seen.append, "writes held"),
    "a closure": (lambda monitor: _closure(monitor.seen), "writes held"),
    "a method": (lambda monitor: monitor.record, "writes held"),
    "a partial": (lambda monitor: functools.partial(Monitor.record, monitor), "writes held"),
    "a partial of append": (lambda monitor: functools.partial(monitor.seen.append), "writes held"),
    "a partial's argument": (lambda monitor: functools.partial(_append, monitor.seen), "writes held"),
    "a partial in a closure": (lambda monitor: _closure_of(functools.partial(_append, monitor.seen)), "writes held"),
    "a method in a closure": (lambda monitor: _closure_of(monitor.record), "writes held"),
    "an ordered dict's": (lambda monitor: list(OrderedDict(a=monitor.seen.append).values()), "writes held"),
    "append in a list": (lambda monitor: [monitor.seen.append], "writes held"),
    "a closure in a closure": (lambda monitor: _closure_of(_closure(monitor.seen)), "writes held"),
    "a default": (lambda monitor: lambda value, seen=monitor.seen: seen.append(value), "writes held"),
    "an object's closure": (lambda monitor: lambda value: monitor.record(value), "writes held"),
    "a call by another name": (lambda monitor: monitor.__call__, "writes held"),
}


@pytest.mark.parametrize("name", CALLABLES)
def test_what_a_callable_notes(name):
    monitor, (make, why) = Monitor(), CALLABLES[name]
    model = nn.Sequential(Tells(make(monitor)))
    report = tfk.patch(model)
    assert not monitor.seen, "patch() itself tells the user's object nothing"
    assert why in report.entries[1].note
    model(torch.randn(2, 5, WIDTH))
    assert len(monitor.seen) == 1


def test_what_a_function_notes_in_its_file():
    """Which is no part of the model: its trial notes there too."""
    model = nn.Sequential(Tells(_note))
    assert "writes held" in tfk.patch(model).entries[1].note
    LOG.clear()
    model(torch.randn(2, 5, WIDTH))
    assert len(LOG) == 1


def _of_a_lock(lock):
    return lambda: {} if lock.locked() else {"approximate": "none"}


def _of_a_module():
    import math

    return lambda: {"approximate": "none" if math.inf > 0 else "tanh"}


def test_what_cannot_be_copied_is_no_reason():
    for held in (_of_a_lock(threading.Lock()), _of_a_module(), lambda F=F: {"approximate": "none"}):
        assert tfk.patch(nn.Sequential(Asks(held))).entries[1].note == "feed-forward"


class Chooses(FeedForward):
    """By which function it is, as transformers' own code does."""

    def forward(self, x):
        act = self.held[0]
        return self.b(F.gelu(self.a(x)) if act is F.gelu else F.silu(self.a(x)) if act is F.silu else self.a(x))


UNSET = object()


class ByDefault(FeedForward):
    def forward(self, x):
        return self.b(self.held(self.a(x)))


tfk.patching.declare_feed_forward(Chooses, first="a", second="b", activation="silu")
tfk.patching.declare_feed_forward(ByDefault, first="a", second="b", activation="gelu")


def test_functions_that_hold_nothing_to_write_stay_themselves():
    """F.silu is written in Python and has defaults; a sentinel among them is one object too."""
    unset = lambda x, mode=UNSET: F.gelu(x) if mode is UNSET else x
    for model in (Chooses([F.silu]), ByDefault(unset), ByDefault(_closure_of(F.gelu))):
        x = torch.randn(2, 5, WIDTH)
        wanted = model(x)
        assert tfk.patch(model).entries[0].replaced, model
        torch.testing.assert_close(model(x), wanted)
    assert "what was declared is not true of it" in tfk.patch(Chooses([F.gelu])).entries[0].note


class Trainer:
    """Whoever holds tensors is left out of it."""

    def __init__(self):
        self.data, self.scale = torch.zeros(8), 1.0

    def __deepcopy__(self, memo):
        raise AssertionError("copied")


def test_a_trainer_in_a_closure_is_not_copied():
    trainer = Trainer()
    assert tfk.patch(nn.Sequential(ByDefault(lambda x: F.gelu(x * trainer.scale)))).entries[1].replaced


def test_containers_that_hold_themselves():
    around = {"options": dict}
    around["self"] = [around]
    assert tfk.patch(nn.Sequential(Looks(around))).entries[1].note == "feed-forward"


def test_callables_that_read_alone():
    options = {"approximate": "none"}
    for held in (lambda: options, lambda: {**options}, options.copy, functools.partial(dict, options)):
        model, x = nn.Sequential(Asks(held)), torch.randn(2, 5, WIDTH)
        wanted = model(x)
        assert tfk.patch(model).entries[1].note == "feed-forward"
        torch.testing.assert_close(model(x), wanted)


@pytest.mark.parametrize("make", [random.Random, np.random.default_rng, np.random.RandomState])
def test_generators_of_the_modules_own(make):
    model, stock = nn.Sequential(Drops(make(1))).train(), nn.Sequential(Drops(make(1))).train()
    report = tfk.patch(model)
    assert report.entries[1].note == "because its forward writes held, which the fused one does not"
    x = torch.randn(2, 5, WIDTH)
    dropped, wanted = ([not each(x).any() for _ in range(100)] for each in (model, stock))
    assert any(wanted) and dropped == wanted, "the trial draws by a generator of its own"


def test_counters():
    model = nn.Sequential(Counts(itertools.count()))
    assert "writes held" in tfk.patch(model).entries[1].note
    model(torch.randn(2, 5, WIDTH))
    assert next(model[0].held) == 1


@pytest.mark.parametrize("read_before", [False, True])
def test_cached_properties(read_before):
    for cls, note in (
        (Caches, "because its forward writes norms, which the fused one does not"),
        (CachesInTraining, "because its forward writes norms, which the fused one does not"),
        (Reads, "feed-forward"),
    ):
        model = nn.Sequential(cls())
        if read_before:
            model(torch.randn(2, 5, WIDTH))
        assert tfk.patch(model).entries[1].note == note, cls


@pytest.mark.parametrize(
    "cls, what", [(CountsInItsClass, "CountsInItsClass.calls"), (NotesInItsClass, "CountsInItsClass.seen")]
)
def test_what_a_class_holds(cls, what):
    assert tfk.patch(cls()).entries[0].note == f"because its forward writes {what}, which the fused one does not"


def test_what_train_writes_is_the_fused_modules_too():
    model = nn.Sequential(NotesItsMode())
    assert tfk.patch(model).entries[1].replaced
    assert model.eval()[0].mode == "evaluation" and model.train()[0].mode == "training"
