"""The numeric contract, held against the code that an H200 would be given, and an A100."""

import pytest

from tests.ptx.chosen import NORMS, assert_every_level, assert_held, marked_cases

FAMILIES = (NORMS, ("attention",), ("attention_varlen",), ("ffn",), ("linear_cross_entropy",), ("rotary",))
HOPPER = [case for ops in FAMILIES for case in marked_cases(ops)]
# Triton's code for an A100 differs by what it multiplies and how wide, in each way that tensors lie
OF_AMPERE = {("attention",): ("dtype", "d", "layout"), ("ffn",): ("dtype", "layout", "activation"), NORMS: None}
AMPERE = [case for ops, factors in OF_AMPERE.items() for case in marked_cases(ops, factors)]


@pytest.mark.parametrize("case", HOPPER)
def test_hopper(case, gpu):
    assert_held(case, "triton", gpu)


@pytest.mark.parametrize("arch", [80])
@pytest.mark.parametrize("case", AMPERE)
def test_ampere(case, gpu):
    assert_held(case, "triton", gpu)


def test_cases_have_every_level():
    for ops in FAMILIES:
        assert_every_level(marked_cases(ops), at_most=40)
    assert len(HOPPER) >= 750
