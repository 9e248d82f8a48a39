"""The numeric contract, held against the code that an H200 would be given, and an A100."""

import pytest

from tests.ptx.chosen import NORMS, assert_every_level, assert_held, marked_cases

FAMILIES = {  # the ops of each -> how often its quick cases have every level
    NORMS: 1, ("attention",): 2, ("attention_varlen",): 1, ("ffn",): 2, ("linear_cross_entropy",): 1, ("rotary",): 1,
}  # fmt: skip
HOPPER = [case for ops, times in FAMILIES.items() for case in marked_cases(ops, times)]
AMPERE = [case for ops in (("attention",), ("ffn",), NORMS) for case in marked_cases(ops)]


@pytest.mark.parametrize("case", HOPPER)
def test_hopper(case, gpu):
    assert_held(case, "triton", gpu)


@pytest.mark.parametrize("arch", [80])
@pytest.mark.parametrize("case", AMPERE)
def test_ampere(case, gpu):
    assert_held(case, "triton", gpu)


def test_cases_have_every_level():
    for ops, times in FAMILIES.items():
        assert_every_level(marked_cases(ops, times), at_most=60)
    assert len(HOPPER) >= 750
