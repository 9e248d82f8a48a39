"""What the tests of compiled kernels say under another Triton than the one that the committed tables are of."""

import json

import pytest
import triton

from tests.aot import (
    attention_bwd_table,
    attention_table,
    ffn_table,
    int8_ffn_table,
    int8_linear_table,
    linear_cross_entropy_table,
    plan,
    rotary_table,
    table,
)

FIGURES = {"registers": 32, "stack": 0, "local": 0, "shared": 0}
SPILLED = {**FIGURES, "stack": 16, "LDL": 4, "stack in loops": 0}


@pytest.fixture(params=[triton.__version__, "0.0.0"])
def committed(request, tmp_path):
    """A table of this Triton, then one of another."""
    file = tmp_path / "table.json"
    file.write_text(json.dumps({"triton": request.param, "kernels": {"sm_90 kernel": FIGURES}}))
    return file, request.param == triton.__version__


def judge(file, found, stack=0):
    with plan.held("sm_90 kernel", found, file):
        plan.keeps_to_registers("sm_90 kernel", found, stack)


def test_figures_are_compared_with_a_table_of_this_triton_alone(committed):
    file, ours = committed
    judge(file, FIGURES)
    others = {**FIGURES, "registers": 33}
    if ours:
        with pytest.raises(AssertionError, match=r"write table\.json anew"):
            judge(file, others)
    else:
        judge(file, others)


def test_a_spill_fails_and_under_another_triton_as_expected_and_with_both_named(committed):
    file, ours = committed
    both = f"planned with triton 0.0.0, and this is {triton.__version__}: sm_90 kernel spills: .*'stack': 16"
    with pytest.raises(plan.Spill if ours else pytest.xfail.Exception, match="sm_90 kernel spills" if ours else both):
        judge(file, SPILLED)


def test_any_other_assertion_is_as_hard_under_every_triton(committed):
    with pytest.raises(AssertionError, match="not deterministic"):
        with plan.held("sm_90 kernel", FIGURES, committed[0]):
            raise AssertionError("not deterministic")


def test_a_planned_stack_must_stay_out_of_the_main_loop():
    plan.keeps_to_registers("k", SPILLED, stack=16)
    for found in ({**SPILLED, "stack in loops": 1}, {**SPILLED, "stack": 17}, {**SPILLED, "local": 1}):
        with pytest.raises(plan.Spill):
            plan.keeps_to_registers("k", found, stack=16)
    with pytest.raises(KeyError):
        plan.keeps_to_registers("k", {**FIGURES, "stack": 16}, stack=16)


def test_the_tables_are_of_one_triton_and_it_is_said_where_another_runs():
    tables = table, attention_table, attention_bwd_table, ffn_table, linear_cross_entropy_table, rotary_table
    tables += int8_linear_table, int8_ffn_table
    (version,) = {table.load(module.FILE)["triton"] for module in tables}
    if version != triton.__version__:
        pytest.skip(
            f"the committed tables are of triton {version}, and this is {triton.__version__}: kernels are compiled and "
            "held to their plans, but their figures are compared with nothing"
        )
