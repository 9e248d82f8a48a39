"""Which cases of attention every run tries on kernels that take long on a CPU."""

import pytest

from tests.cases import CASES

OPS = ("attention", "attention_varlen")
ATTENTION = [case for case in CASES if case.op in OPS and case.levels["dtype"] != "f64"]
MOST = 8  # what a quick case may cost
FIRST = {"attention": 330, "attention_varlen": 60}


def cost(case, of_float32):
    """Tiles of pairs that a case has at most; of float32, which is slower or has smaller tiles, as many times more."""
    times = of_float32 if case.levels["dtype"] == "f32" else 1
    if case.op == "attention_varlen":
        pairs = {"tiles": 6, "many": 13}.get(case.levels["segments"], 4)
        return times * pairs * case.levels["heads"][0] // 4
    (queries, keys), (batch, heads, _) = case.levels["lengths_qk"], case.levels["heads"]
    return times * batch * heads * -(-queries // 64) * -(-keys // 64)


def marked_cases(of_float32):
    """Every case, as a parameter of a test; those that cost much or come late are slow."""
    found = []
    for op in OPS:
        for index, case in enumerate(case for case in ATTENTION if case.op == op):
            slow = index >= FIRST[op] or cost(case, of_float32) > MOST
            found.append(pytest.param(case, id=case.id, marks=pytest.mark.slow if slow else ()))
    return found


def assert_enough_cases(marked):
    """The quick ones have every level of every factor."""
    quick = [parameter.values[0] for parameter in marked if not parameter.marks]
    assert len(quick) >= 150 and len(ATTENTION) >= 500
    for factor in ("dtype", "band", "keep", "bias", "key_lengths", "layout", "dropout_p", "heads", "data"):
        levels = {case.levels[factor] for case in quick if factor in case.levels}
        assert levels == {case.levels[factor] for case in ATTENTION if factor in case.levels}, factor
