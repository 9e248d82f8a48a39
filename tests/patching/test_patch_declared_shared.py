"""What a module of a declared class shares with the copy that is tried: nothing of it is another object there, and what
the trial writes into it is put back."""

import collections
import functools
import itertools
import os
import random
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfm_kernels as tfk
from tests.patching import attentions
from tfm_kernels.patching import copying, effects

WIDTH = 32
WRITES = "because its forward writes {}, which the fused one does not"


class FeedForward(nn.Module):
    def __init__(self, held=None):
        super().__init__()
        self.a, self.b, self.held = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), held

    def forward(self, x):
        return self.b(self.held(self.a(x)))


class Chooses(FeedForward):
    """By whether what it holds is what it was given."""

    def forward(self, x):
        h = F.gelu(self.a(x))
        return self.b(h * 2 if self.held is CHOSEN[0] else h)


class Sets(FeedForward):
    """For the time of the call."""

    def __init__(self):
        super().__init__()
        scale = 1.0

        def set_(value):
            nonlocal scale
            scale = value

        self.set, self.scaled = set_, lambda x: x * scale

    def forward(self, x):
        self.set(0.5)
        try:
            return self.b(self.scaled(F.gelu(self.a(x))))
        finally:
            self.set(1.0)


class Counts(FeedForward):
    def __init__(self):
        super().__init__()
        calls = 0

        def count():
            nonlocal calls
            calls += 1
            return calls

        self.count, self.calls = count, lambda: calls

    def forward(self, x):
        self.count()
        return self.b(F.gelu(self.a(x)))


class InItsClass(FeedForward):
    calls, seen, options = 0, [], {"approximate": "none"}

    def forward(self, x):
        type(self).calls += 1
        type(self).last = x.shape
        self.seen.append(len(x))
        return self.b(F.gelu(self.a(x), **self.options))


CHOSEN = [None]
for cls in (FeedForward, Chooses, Sets, Counts, InItsClass):
    tfk.patching.declare_feed_forward(cls, first="a", second="b", activation="gelu")


def x():
    return torch.randn(2, 5, WIDTH)


def note(model):
    """Of the report; of a class that was never as it is declared, what patch raises."""
    try:
        return tfk.patch(model).entries[0].note
    except ValueError as error:
        return str(error)


FALSE = "FeedForward.forward must give b(gelu(a(x))), got other numbers"


class Sentinel:
    def __init__(self, name):
        self.name = name


class Named(functools.partial):
    def __call__(self, *args):
        return super().__call__(*args) * 2


def keyword_only(x, *, approximate="none"):
    return F.gelu(x, approximate=approximate)


UNSET = Sentinel("UNSET")


@pytest.mark.parametrize(
    "held",
    [keyword_only, lambda x, options=[]: x, functools.partial(F.gelu, approximate="none"), UNSET.__init__],
    ids=["keyword-only default", "a default to write into", "partial", "method"],
)
def test_a_callable_that_holds_no_part_is_the_same_in_the_trial(held):
    """A forward may go by which one it is: this one does something else where it is the one chosen."""
    model = Chooses(held)
    CHOSEN[0] = held
    if isinstance(held, (functools.partial, type(UNSET.__init__))):
        assert note(model) == "feed-forward", "deepcopy makes another one"
    else:
        assert FALSE.replace("FeedForward", "Chooses") in note(model)


@pytest.mark.parametrize(
    "make",
    [
        lambda: lambda x, mode=UNSET: F.gelu(x) * 2 if mode is UNSET else F.gelu(x),
        lambda: (lambda held: lambda x: F.gelu(x) * REGISTERED.get(held, 1.0))(UNSET),
        lambda: Named(F.gelu),
    ],
    ids=["a default", "a key", "a partial of one's own"],
)
def test_what_goes_by_identity_is_seen(make):
    assert FALSE in note(FeedForward(make()))


REGISTERED = weakref.WeakKeyDictionary({UNSET: 2.0})


def test_functions_that_share_a_variable_share_it_in_the_trial():
    assert FALSE.replace("FeedForward", "Sets") in note(Sets())
    model = Counts()
    assert note(model) == WRITES.format("count") and model.calls() == 0
    model(x())
    assert model.calls() == 1


class Locked:
    def __init__(self):
        self.lock, self.scale = threading.Lock(), 2.0


def test_what_cannot_be_copied_is_shared_by_all_that_hold_it():
    held = Locked()
    up, down = (lambda x: x * held.scale), (lambda x: x / getattr(held, "scale", 1.0))
    assert note(FeedForward(lambda x: down(up(F.gelu(x))))) == "feed-forward"


class Owns:
    """A file, which it closes at its end."""

    def __init__(self):
        self.file = os.open(os.devnull, os.O_RDONLY)

    def __del__(self):
        os.close(self.file)


def test_what_closes_things_at_its_end_is_not_copied():
    owner = Owns()
    model = FeedForward(lambda x: F.gelu(x) if os.fstat(owner.file) else x)
    assert note(model) == "feed-forward"
    os.fstat(owner.file)


def _noting(notes):
    def act(x):
        act.calls += 1
        notes["list"].append(1)
        notes["set"].add(len(notes["list"]))
        notes["deque"].append(2)
        notes["object"].name = "written"
        notes["object"].new = 1
        notes["generator"].random()
        torch.rand(1, generator=notes["torch"])
        notes["put"](0, notes["list"][0])
        return F.gelu(x)

    act.calls = 0
    return act


def test_what_the_trial_writes_is_put_back():
    notes = {
        "list": [0], "set": {0}, "deque": collections.deque([0], maxlen=9), "object": Sentinel("object"),
        "generator": random.Random(1), "torch": torch.Generator().manual_seed(1),
    }  # fmt: skip
    notes["put"] = notes["list"].__setitem__
    drawn = notes["generator"].getstate(), notes["torch"].get_state()
    act = _noting(notes)
    assert note(FeedForward(act)) == WRITES.format("held")
    assert (notes["list"], notes["set"], [*notes["deque"]]) == ([0], {0}, [0]) and act.calls == 0
    assert vars(notes["object"]) == {"name": "object"}
    assert notes["generator"].getstate() == drawn[0] and torch.equal(notes["torch"].get_state(), drawn[1])
    act(torch.ones(1))
    assert act.calls == 1 and notes["list"] == [0, 1] and notes["object"].new == 1


def test_what_a_class_holds_is_put_back():
    assert note(InItsClass()) == WRITES.format("InItsClass.calls")
    assert InItsClass.calls == 0 and InItsClass.seen == [] and not hasattr(InItsClass, "last")


def test_a_forward_that_raises_leaves_nothing_behind():
    seen = []

    def act(x):
        seen.append(1)
        raise RuntimeError("no")

    assert note(FeedForward(act)) == WRITES.format("held") and seen == []


LOG = []


@pytest.mark.parametrize(
    "act",
    [lambda x: ([LOG.append(1) for _ in (1,)], F.gelu(x))[1], lambda x: ((lambda: LOG.append(1))(), F.gelu(x))[1]],
    ids=["a comprehension", "a function"],
)
def test_what_is_written_inside_of_a_function_is_seen_in_its_file(act):
    assert note(FeedForward(act)) == WRITES.format("held")
    assert LOG, "which is no part of the model: its trial notes there too"
    LOG.clear()


def test_a_large_vocabulary_is_known_by_its_length(monkeypatch):
    words = {str(number): number for number in range(30_000)}
    looked, real = itertools.count(), effects._Held._state

    def state(self, value, depth):
        next(looked)
        return real(self, value, depth)

    monkeypatch.setattr(effects._Held, "_state", state)
    assert note(FeedForward(lambda x: F.gelu(x) if words else x)) == "feed-forward"
    assert next(looked) < 10_000


def test_callables_that_hold_the_models_parts_hold_the_copys():
    """However deep: a copy that ran the original's layers would be no copy."""

    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(WIDTH, WIDTH)
            run = lambda x: self.a(x)
            around = lambda x, run=run: run(x)
            layers = [self.a]

            def again(x, times=1):
                return layers[0](x) if times == 0 else again(x, times - 1)

            self.runs = [run, around, functools.partial(around), again, lambda x: functools.partial(run)(x)]
            self.table = {"method": (self.twice,), "of a list": layers.__getitem__}

        def twice(self, x):
            return self.a(x) * 2

        def forward(self, x):
            return sum(run(x) for run in self.runs) + self.table["method"][0](x) + self.table["of a list"](0)(x)

    model, rows = Holds(), x()
    wanted = model(rows)
    other = copying.copied(model)
    torch.testing.assert_close(other(rows), wanted)
    with torch.no_grad():
        other.a.weight.zero_(), other.a.bias.zero_()
    assert not other(rows).any() and torch.equal(model(rows), wanted)


class Table:
    """A causal mask that grows, in an attribute."""

    def __init__(self):
        self.hidden = None

    def __call__(self, length):
        if self.hidden is None or len(self.hidden) < length:
            self.hidden = torch.ones(length, length).tril() == 0
        return self.hidden[:length, :length]


def _split(module, x):
    """Queries, keys and values, (B, H, T, D)."""
    parts = module.c_attn(x).split(module.n_embd, dim=2)
    return [part.view(*x.shape[:2], module.n_head, -1).transpose(1, 2) for part in parts]


class WithTable(attentions.CausalSelfAttention):
    def __init__(self):
        super().__init__()
        self.table = Table()

    def forward(self, x):
        q, k, v = _split(self, x)
        scores = (q @ k.transpose(-2, -1)) * k.size(-1) ** -0.5
        weights = self.attn_dropout(scores.masked_fill(self.table(x.size(1)), -torch.inf).softmax(-1))
        return self.resid_dropout(self.c_proj((weights @ v).transpose(1, 2).reshape(x.shape)))


class KeepsACall(attentions.CausalSelfAttention):
    def forward(self, x):
        p = self.attn_dropout.p if self.training else 0.0
        self.attend = functools.partial(F.scaled_dot_product_attention, is_causal=True, dropout_p=p)
        return self.resid_dropout(self.c_proj(self.attend(*_split(self, x)).transpose(1, 2).reshape(x.shape)))


class CallableDict(dict):
    def __call__(self, length):
        return self.setdefault(length, torch.ones(length, length).tril() == 0)


class WithADict(WithTable):
    def __init__(self):
        super().__init__()
        self.table = CallableDict()


TOLD = []


class Tells(KeepsACall):
    def __init__(self):
        super().__init__()
        self.tell = TOLD.append

    def forward(self, x):
        self.tell(len(x))
        return super().forward(x)


@pytest.mark.parametrize("run_before", [False, True])
@pytest.mark.parametrize(
    "cls, found",
    [
        (WithTable, "fused attention"),
        (WithADict, "fused attention"),
        (KeepsACall, "fused attention"),
        (Tells, WRITES.format("tell")),
    ],
)
def test_attention_may_keep_tables_and_callables_but_not_tell_others(cls, found, run_before):
    tfk.patching.declare_attention(cls, **attentions.NANO)
    model = cls().eval()
    if run_before:
        model(torch.randn(1, 64, model.n_embd))
    assert note(model) == found and TOLD == [1] * (run_before and cls is Tells)
    TOLD.clear()
