"""signature(): equal for calls that checks and choice cannot tell apart, different for others, None for the rest."""

import itertools

import pytest
import torch

from tfm_kernels import Mask, _library
from tfm_kernels.mask import Band

X = torch.zeros(2, 3)
DIFFERENT = {
    "None": None,
    "False": False,
    "True": True,
    "0": 0,
    "1": 1,
    "0.0": 0.0,
    "-0.0": -0.0,
    "1.0": 1.0,
    "''": "",
    "'1'": "1",
    "long string": "a string of more than eight bytes",
    "longer string": "a string of more than eight bytes.",
    "()": (),
    "(1,)": (1,),
    "((1,),)": ((1,),),
    "band": Band(high=0),
    "tensor": X,
    "other shape": X.T,
    "more dimensions": X[None],
    "other dtype": X.half(),
    "other device": X.to("meta"),
    "other layout": X.to_sparse(),
    "needs a gradient": X.clone().requires_grad_(),
}
NONE = {
    "list": [1],
    "tuple of a list": ([1],),
    "mask": Mask(),
    "huge int": 1 << 70,
    "int subclass": type("Count", (int,), {})(1),
    "tensor subclass": X.as_subclass(type("Tagged", (torch.Tensor,), {})),
    "lone surrogate": "\ud800",
}


@pytest.mark.parametrize("pair", list(itertools.combinations(DIFFERENT, 2)), ids=" and ".join)
def test_what_differs_differs(pair):
    first, second = (_library.signature(DIFFERENT[name], "rest") for name in pair)
    assert isinstance(first, bytes) and isinstance(second, bytes) and first != second


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_is_alike_is_alike(name):
    part = DIFFERENT[name]
    again = part.clone() if isinstance(part, torch.Tensor) else part
    if isinstance(part, torch.Tensor) and part.requires_grad:
        again = part.detach().clone().requires_grad_()
    assert _library.signature(part) == _library.signature(again)


@pytest.mark.parametrize("name", NONE)
def test_what_has_no_signature(name):
    assert _library.signature("op", NONE[name], X) is None


def test_parts_do_not_run_together():
    assert _library.signature((1,), 2) != _library.signature((1, 2))
    assert _library.signature("ab", "c") != _library.signature("a", "bc")
    assert _library.signature(X, None) != _library.signature(None, X)


def test_grad_mode_counts():
    leaf = DIFFERENT["needs a gradient"]
    with torch.no_grad():
        without = _library.signature(leaf)
        assert without == _library.signature(X), "no graph is recorded, so nobody can tell them apart"
    assert without != _library.signature(leaf)


def test_a_parameter_is_a_tensor():
    assert _library.signature(torch.nn.Parameter(X)) == _library.signature(X.clone().requires_grad_())


@pytest.mark.parametrize("pair", list(itertools.combinations([*DIFFERENT, "list"], 2)), ids=" and ".join)
def test_launches_differ(pair):
    first, second = (_library._launch_signature({**DIFFERENT, **NONE}[name], "rest") for name in pair)
    alike = {"tensor", "needs a gradient"} == set(pair)  # what is launched does not depend on it
    none = "other layout" in pair  # a sparse tensor
    assert (first == second) == alike and (first is None or second is None) == none


def test_launches_of_other_layouts_differ():
    x = torch.zeros(40)
    calls = [
        (x[:4],), (x[::2][:4],), (x[1:5],), (x[2:6],), (x[:4], x[:4]), (x[:4], x[4:8]), (x[:4][None],), ([x[:4]],),
        ([1, 2],), ([1], 2), ((1, 2),),
    ]  # fmt: skip
    y = x[:4]
    calls.append((y, y))
    found = [_library._launch_signature(*call) for call in calls]
    assert None not in found and len(set(found)) == len(found) - 1
    assert found[4] != found[-1]  # the same tensor twice; two of the same memory are like any two that begin alike
    assert _library._launch_signature(x[4:8]) == found[0]


@pytest.mark.parametrize("name", sorted(NONE.keys() - {"list", "tuple of a list"}))
def test_launches_without_a_signature(name):
    assert _library._launch_signature("op", NONE[name], X) is None
