"""Calls that Triton's launchers repeat (tfm_kernels/triton/_replay.py) run the same kernels on new numbers."""

import pytest
import torch

from tests.cases import Case
from tests.ptx.chosen import NORMS, marked_cases
from tfm_kernels import _library
from tfm_kernels.testing import run
from tfm_kernels.triton import _replay

OPS = (NORMS, ("attention",), ("attention_varlen",), ("ffn",), ("linear_cross_entropy",), ("rotary",))
EACH = 3
QUICK = [[p.values[0] for p in marked_cases(ops) if not p.marks] for ops in OPS]
CASES = [
    pytest.param(case, marks=pytest.mark.slow if number % max(1, len(cases) // EACH) else ())
    for cases in QUICK
    for number, case in enumerate(cases)
]
# norms of rows that have a launch for their sums over rows, and of those that are walked
_WHOLE = {"op": "layer_norm", "dtype": "bf16", "data": "randn", "layout": "contiguous", "weight": "same", "bias": "f32"}
_WHOLE |= {"rows": (17,), "eps": None, "unbiased": False}
CASES += [Case("layer_norm", {**_WHOLE, "width": width}) for width in (8200, 16392)]


def other_numbers(inputs):
    """The same layouts with other values, where each element has a place of its own."""
    for t in inputs.values():
        if isinstance(t, torch.Tensor) and t.is_floating_point() and not torch._debug_has_internal_overlap(t):
            t.mul_(-0.5)
    return inputs


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_new_numbers(case, gpu, monkeypatch):
    monkeypatch.setattr(_replay, "_found", {})
    first, second, third = (case.inputs() for _ in range(3))
    run(case.op, first, "triton", douts=case.douts)
    run(case.op, second, "triton", douts=case.douts)
    assert all(isinstance(found, _replay.Replay) for found in _replay._found.values())
    gpu.begin(seed=gpu.seed)
    repeated = run(case.op, other_numbers(third), "triton", douts=case.douts)
    names = gpu.launches
    gpu.begin(seed=gpu.seed)
    with _library.plans_anew():
        planned = run(case.op, third, "triton", douts=case.douts)
    assert names == gpu.launches
    for there, here in ((planned.outputs, repeated.outputs), (planned.grads, repeated.grads)):
        for name, t in there.items():
            assert (t is None) == (here[name] is None), name
            assert t is None or torch.equal(t.nan_to_num(7.0), here[name].nan_to_num(7.0)), name
