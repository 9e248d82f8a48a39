"""Second meta-test: every planted defect is caught on the data meant for it, and only the defect is."""

import functools

import pytest
import torch

from tfm_kernels.testing import judge
from tfm_kernels.testing.contract import draw_douts
from tfm_kernels.testing.defects import DEFECTS
from tfm_kernels.testing.emulations import emulate

PLANTED = [
    pytest.param(defect, dtype, id=f"{defect.op}-{defect.name}-{str(dtype).removeprefix('torch.')}".replace(" ", "_"))
    for defect in DEFECTS
    for dtype in defect.dtypes
]


@functools.cache
def clean(op, build, dtype, tile):
    """The inputs and output gradients of a defect, on which the clean emulation has to pass."""
    inputs = build(dtype)
    outputs, _ = emulate(op, inputs, {})
    douts = draw_douts(outputs)
    judge(op, inputs, *emulate(op, inputs, douts, tile=tile), douts, backend="clean").raise_broken()
    return inputs, douts


@pytest.mark.parametrize("defect, dtype", PLANTED)
def test_caught(defect, dtype):
    inputs, douts = clean(defect.op, defect.build, dtype, defect.tile)
    wrong = emulate(defect.op, inputs, douts, tile=defect.tile, hooks=defect.hooks)
    # of reference more is forgiven where autograd sums, and nothing else
    for backend in ("planted", "reference") if defect.op.startswith("add_") else ("planted",):
        report = judge(defect.op, inputs, *wrong, douts, backend=backend)
        assert not report.passed, f"not caught: {report}"


def test_there_are_enough_of_them():
    assert len(DEFECTS) >= 80 and len({(d.op, d.name) for d in DEFECTS}) == len(DEFECTS)
    assert all(set(d.dtypes) <= {torch.bfloat16, torch.float16, torch.float32} for d in DEFECTS)
