"""undone(): what a function that a module holds writes into is as it was after the block, in whatever form it comes."""

import random
import weakref
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from functools import cached_property, partial, partialmethod, wraps

import numpy as np
import pytest
import torch
from torch import nn

from tfm_kernels.patching import copying
from tfm_kernels.patching.undone import undone


class Slotted:
    __slots__ = ("value", "other", "__private")

    def __init__(self):
        self.value, self.__private = 1, 2

    def write(self):
        self.value, self.other, self.__private = 3, 4, 5

    def told(self):
        return self.value, hasattr(self, "other"), self.__private


class OfADict(dict):
    def write(self):
        self["a"], self.name = 2, "written"

    def told(self):
        return dict(self), vars(self)


class Timed(OrderedDict):
    def __setitem__(self, key, value):
        super().__setitem__(key, (1.0, value))

    def write(self):
        self["a"] = 2

    def told(self):
        return [*self.items()]


class OfAList(list):
    def write(self):
        self.append(1)

    def told(self):
        return [*self]

    def clear(self):
        raise AssertionError("its own methods may do anything")


class WithProperty:
    def __init__(self):
        self.__dict__["value"], self.after = 1, 1

    value = property(lambda self: self.__dict__["value"])

    def write(self):
        self.__dict__["value"] = self.after = 2

    def told(self):
        return self.value, self.after


class Plain:
    """A container, its way of being written, and what it holds."""

    def __init__(self, value, write, told):
        self.value, self._write, self._told = value, write, told

    def write(self):
        self._write(self.value)

    def told(self):
        return self._told(self.value)


def _in_order(value):
    value.move_to_end("a")
    value["a"] = 2


WRITTEN = {
    "slots": Slotted,
    "a dict's subclass": lambda: OfADict(a=1),
    "an ordered dict's subclass": lambda: Timed(b=1),
    "a list's subclass": OfAList,
    "a property": WithProperty,
    "counter": lambda: Plain(Counter(a=5, b=2), lambda c: c.update("abc"), dict),
    "ordered": lambda: Plain(OrderedDict(a=1, b=2), _in_order, lambda d: [*d.items()]),
    "default": lambda: Plain(defaultdict(list), lambda d: d["a"].append(1), dict),
    "deque": lambda: Plain(deque([1, 2], maxlen=2), lambda d: d.append(3), list),
    "set": lambda: Plain({1, 2}, lambda s: s.add(3), set),
    "bytes": lambda: Plain(bytearray(b"ab"), lambda b: b.append(1), bytes),
    "list in a list": lambda: Plain([[1]], lambda value: value[0].append(2), lambda value: [*value[0]]),
    "random": lambda: Plain(random.Random(1), lambda r: r.random(), lambda r: r.getstate()),
    "numpy": lambda: Plain(np.random.default_rng(1), lambda r: r.random(), lambda r: str(r.bit_generator.state)),
    "torch": lambda: Plain(torch.Generator(), lambda g: torch.rand(1, generator=g), lambda g: g.get_state().tolist()),
}


def holding(held):
    module = nn.Linear(2, 2)
    module.tell = lambda: held.write()
    return module


@pytest.mark.parametrize("name", WRITTEN)
def test_it_is_put_back(name):
    held = WRITTEN[name]()
    before, module = held.told(), holding(held)
    with undone(module):
        module.tell()
        assert held.told() != before
    assert held.told() == before
    module.tell()
    assert held.told() != before, "it is what it was, not a copy"


def counted(function):
    calls = []

    def run(*args):
        calls.append(1)
        run.total = len(calls)
        return function(*args)

    run.calls, run.total = calls, 0
    return run


class InItsMethods(nn.Module):
    """Notes calls in a default, and in what decorates a method, one of the class, a static one and a property."""

    @counted
    def forward(self, seen=[]):  # noqa: B006
        seen.append(1)
        self.made(), self.told(), self.later

    made = classmethod(counted(lambda cls: None))
    told = staticmethod(counted(lambda: None))
    later = property(counted(lambda self: None))


def counted(function):
    @wraps(function)
    def counting(*arguments):
        counting.calls.append(1)
        return function(*arguments)

    counting.calls = []
    return counting


class Counting(nn.Module):
    @property
    @counted
    def plain(self):
        return 1.0

    @cached_property
    @counted
    def cached(self):
        return 1.0

    half = partialmethod(counted(lambda self, n: n), 2)


def test_what_functions_of_properties_hold_is_put_back():
    model = Counting()
    with undone(model):
        assert (model.plain, model.cached, model.half()) == (1.0, 1.0, 2)
    held = vars(Counting)
    assert [f.calls for f in (held["plain"].fget, held["cached"].func, held["half"].func)] == [[], [], []]


def test_what_methods_hold_is_put_back():
    module = InItsMethods()
    own = vars(InItsMethods)
    functions = own["forward"], own["made"].__func__, own["told"].__func__, own["later"].fget
    seen = functions[0].__closure__[1].cell_contents.__defaults__[0]
    with undone(module):
        module()
        assert seen == [1] and all(function.total == 1 for function in functions)
    assert seen == [] and all(function.total == 0 and function.calls == [] for function in functions)


class Lazy:
    @property
    def __dict__(self):
        raise RuntimeError("outside of a context")


class Hidden:
    @property
    def __class__(self):
        raise RuntimeError("outside of a context")


@pytest.mark.parametrize("make", [random.SystemRandom, Lazy, Hidden, lambda: weakref.proxy(Slotted.write.__class__)])
def test_what_refuses_to_be_looked_at_is_passed_over(make):
    seen = []
    held = [make(), seen] if make is not None else []
    module = nn.Linear(2, 2)
    module.tell = lambda: held and seen.append(1)
    with undone(module):
        module.tell()
    assert seen == []


Pair = namedtuple("Pair", "layer number")


@pytest.mark.parametrize(
    "make",
    [
        lambda layer: (lambda pair: lambda x: pair.layer(x))(Pair(layer, 1)),
        lambda layer: (lambda layers: lambda x: next(iter(layers))(x))(frozenset([layer])),
        lambda layer: (lambda table: lambda x: next(iter(table))(x))({layer: 1}),
    ],
    ids=["a namedtuple", "a frozenset", "keys"],
)
def test_copies_hold_their_own_parts_in_any_container(make):
    model = nn.Sequential(nn.Linear(2, 2))
    model.run = make(model[0])
    other = copying.copied(model)
    with torch.no_grad():
        other[0].weight.zero_(), other[0].bias.zero_()
    assert not other.run(torch.ones(1, 2)).any() and model.run(torch.ones(1, 2)).any()


def test_a_function_may_hold_itself_by_an_attribute():
    model = nn.Sequential(nn.Linear(2, 2))

    def run(x):
        return model[0](x)

    run.forget, model.run = partial(max, run), run
    other = copying.copied(model)
    assert other.run.forget.args == (other.run,) and other.run is not run


def test_copies_hold_their_own_parts_as_attributes_of_functions():
    model = nn.Sequential(nn.Linear(2, 2))

    def run(x):
        return run.layer(x)

    run.layer, model.run = model[0], run
    other = copying.copied(model)
    with torch.no_grad():
        other[0].weight.zero_(), other[0].bias.zero_()
    assert not other.run(torch.ones(1, 2)).any() and model.run(torch.ones(1, 2)).any()
