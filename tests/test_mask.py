"""Mask: what each kind means, how they combine, what is refused."""

import copy
import pickle

import numpy
import pytest
import torch

from tfm_kernels import Mask

B, H, TQ, TK = 2, 3, 4, 6


def by_definition(condition):
    return torch.tensor(
        [[[[condition(b, i, j) for j in range(TK)] for i in range(TQ)] for _ in range(H)] for b in range(B)]
    )


KINDS = {
    "causal top-left": (Mask.causal(), lambda b, i, j: j <= i),
    "causal bottom-right": (Mask.causal("bottom_right"), lambda b, i, j: j <= i + TK - TQ),
    "window": (Mask.window(1, 2), lambda b, i, j: i - 1 <= j <= i + 2),
    "window left only": (Mask.window(1, None), lambda b, i, j: i - 1 <= j),
    "window right only": (Mask.window(None, 0), lambda b, i, j: j <= i),
    "window bottom-right": (Mask.window(2, 1, "bottom_right"), lambda b, i, j: i + 2 - 2 <= j <= i + 2 + 1),
    "lengths": (Mask.lengths(torch.tensor([0, 5])), lambda b, i, j: j < [0, 5][b]),
    "other lengths": (Mask.lengths(torch.tensor([4, 2])), lambda b, i, j: j < [4, 2][b]),
    "keep": (Mask.keep(torch.arange(TK)[None, :] != torch.arange(TQ)[:, None]), lambda b, i, j: i != j),
    "hide": (Mask.hide(torch.arange(TK)[None, :] != torch.arange(TQ)[:, None]), lambda b, i, j: i == j),
    "keep per batch": (
        Mask.keep((torch.arange(TK) + torch.arange(B)[:, None, None, None]) % 2 == 0),
        lambda b, i, j: (j + b) % 2 == 0,
    ),
    "everything": (Mask(), lambda b, i, j: True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_dense_is_the_definition(kind):
    mask, condition = KINDS[kind]
    assert torch.equal(mask.dense(B, H, TQ, TK), by_definition(condition))


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_and_is_the_intersection(first, second):
    a, b = KINDS[first][0], KINDS[second][0]
    expected = a.dense(B, H, TQ, TK) & b.dense(B, H, TQ, TK)
    assert torch.equal((a & b).dense(B, H, TQ, TK), expected)


def test_key_lengths_never_shift_a_bottom_right_window():
    mask = Mask.causal("bottom_right") & Mask.lengths(torch.tensor([3, 6]))
    condition = lambda b, i, j: j <= i + TK - TQ and j < [3, 6][b]
    assert torch.equal(mask.dense(B, H, TQ, TK), by_definition(condition))


def test_copies_and_explanations():
    mask = Mask.causal() & Mask.lengths(torch.tensor([1, 2]))
    for other in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask)), mask.to("cpu")):
        assert torch.equal(other.dense(B, H, TQ, TK), mask.dense(B, H, TQ, TK))
    assert "top-left" in mask.explain() and "2 sequences" in mask.explain()
    assert Mask().explain() == "every query attends to every key"
    assert mask.has_band() and not Mask().has_band()


BAD = [
    (lambda: Mask.causal("left"), ValueError, "align must be one of"),
    (lambda: Mask.causal(None), ValueError, "align must be one of"),
    (lambda: Mask.window(-1, 0), ValueError, "left must be >= 0"),
    (lambda: Mask.window(0, -2), ValueError, "right must be >= 0"),
    (lambda: Mask.window(1.5, 0), TypeError, "left must be an int"),
    (lambda: Mask.window(0, True), TypeError, "right must be an int"),
    (lambda: Mask.window(0, 0, "diagonal"), ValueError, "align must be one of"),
    (lambda: Mask.lengths([1, 2]), TypeError, "key_lengths must be a tensor"),
    (lambda: Mask.lengths(torch.tensor([1.0])), ValueError, "int32 or int64"),
    (lambda: Mask.lengths(torch.tensor([True])), ValueError, "int32 or int64"),
    (lambda: Mask.lengths(torch.ones(2, 2, dtype=torch.int64)), ValueError, r"shape \(B,\)"),
    (lambda: Mask.lengths(torch.tensor(3)), ValueError, r"shape \(B,\)"),
    (lambda: Mask.keep([[True]]), TypeError, "matrix must be a tensor"),
    (lambda: Mask.keep(torch.zeros(2, 2)), ValueError, "matrix must be bool"),
    (lambda: Mask.keep(torch.ones(2, 3, 4, dtype=torch.bool)), ValueError, r"write \(B, 1, Tq, Tk\)"),
    (lambda: Mask.keep(torch.ones(4, dtype=torch.bool)), ValueError, "2 or 4 dimensions"),
    (lambda: Mask.keep(torch.ones(1, 1, 1, 1, 1, dtype=torch.bool)), ValueError, "2 or 4 dimensions"),
    (lambda: Mask.hide(None), TypeError, "matrix must be a tensor"),
    (lambda: Mask.hide(torch.zeros(2, 2, dtype=torch.int64)), ValueError, "matrix must be bool"),
    (lambda: Mask.hide(torch.ones(2, 3, 4, dtype=torch.bool)), ValueError, r"write \(B, 1, Tq, Tk\)"),
    (lambda: Mask.causal() & True, TypeError, "unsupported operand"),
]


def test_limits_may_be_numbers_of_numpy():
    limits = numpy.int64(2), numpy.int32(1)
    band = Mask.window(*limits).band(5, 7)
    assert band == Mask.window(2, 1).band(5, 7) and all(type(limit) is int for limit in band)


@pytest.mark.parametrize("call, error, message", BAD)
def test_refuses(call, error, message):
    with pytest.raises(error, match=message) as info:
        call()
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    "name, a, b",
    [
        ("key_lengths", Mask.lengths(torch.ones(2).int()), Mask.lengths(torch.ones(3).int())),
        ("keep_matrix", Mask.keep(torch.ones(2, 2) > 0), Mask.keep(torch.ones(3, 3) > 0)),
    ],
)
def test_masks_of_other_sizes_are_not_combined(name, a, b):
    with pytest.raises(ValueError, match=f"Mask: {name} of masks that are combined must broadcast, got"):
        a & b
