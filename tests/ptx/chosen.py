"""Which of the contract's cases every run compiles: a kernel takes seconds."""

import pytest

from tests.cases import pairs_once, report_case

NORMS = ("layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm")


def marked_cases(ops, factors=None):
    """The cases of these ops that have every pair of levels once, as parameters.

    Quick are as few as have every level of every factor, or of those ``factors``: again and again the one that has most
    of what is still to come.
    """
    cases = [case for case in pairs_once() if case.op in ops]
    of = lambda case: {(n, str(v)) for n, v in case.levels.items() if factors is None or n in factors}
    levels = {case.id: of(case) for case in cases}
    left, quick = set().union(*levels.values()), set()
    while left:
        best = max(levels, key=lambda name: len(levels[name] & left))
        quick.add(best)
        left -= levels[best]
    return [pytest.param(case, id=case.id, marks=() if case.id in quick else pytest.mark.slow) for case in cases]


def quick_where(takes, count, parameters):
    """These parameters; quick are the first ones whose cases ``takes`` is true of: what a kernel is there for."""
    taken = [parameter.id for parameter in parameters if takes(parameter.values[0])][:count]
    assert len(taken) == count
    return [pytest.param(*p.values, id=p.id, marks=() if p.id in taken else pytest.mark.slow) for p in parameters]


def assert_every_level(marked, at_most, factors=None):
    """The quick ones are few and have every level of every factor that any has, or of these."""
    quick = [parameter.values[0] for parameter in marked if not parameter.marks]
    every = lambda case: ((name, str(level)) for name, level in case.levels.items() if name in (factors or case.levels))
    levels = lambda cases: {level for case in cases for level in every(case)}
    assert levels(quick) == levels(parameter.values[0] for parameter in marked)
    assert len(quick) <= at_most


def assert_held(case, backend, machine):
    """The contract, by kernels that the machine ran, where the case has anything to compute."""
    report_case(case, backend).raise_broken()
    empty = any(isinstance(level, tuple) and 0 in level for level in case.levels.values())
    assert machine.launches or empty or case.levels.get("segments") in ("no_keys", "none")
