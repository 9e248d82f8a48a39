"""The numeric contract, held against the code that an H200 would be given, and an A100."""

import pytest

from tests.ptx.chosen import NORMS, assert_every_level, assert_held, marked_cases

FAMILIES = (NORMS, ("attention",), ("attention_varlen",), ("ffn",), ("linear_cross_entropy",), ("rotary",))
# the loss's largest cases, which alone have their sizes, take a minute each: `make test-all` compiles them
OF_LOSS = ("dtype", "data", "layout", "bias", "ignored", "ignore_index", "label_smoothing", "reduction")
OF_HOPPER = {ops: OF_LOSS if ops == ("linear_cross_entropy",) else None for ops in FAMILIES}
HOPPER = [case for ops, factors in OF_HOPPER.items() for case in marked_cases(ops, factors)]
# Triton's code for an A100 differs by what it multiplies, in each way that tensors lie
OF_AMPERE = {("attention",): ("dtype", "layout"), ("ffn",): ("dtype", "layout", "activation"), NORMS: ("dtype", "op")}
AMPERE = [case for ops, factors in OF_AMPERE.items() for case in marked_cases(ops, factors)]


@pytest.mark.parametrize("case", HOPPER)
def test_hopper(case, gpu):
    assert_held(case, "triton", gpu)


@pytest.mark.parametrize("arch", [80])
@pytest.mark.parametrize("case", AMPERE)
def test_ampere(case, gpu):
    assert_held(case, "triton", gpu)


def test_cases_have_every_level():
    for ops, factors in OF_HOPPER.items():
        assert_every_level(marked_cases(ops, factors), 20, factors)
    assert len(HOPPER) >= 750
