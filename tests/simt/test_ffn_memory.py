"""ffn: no byte outside of a tensor is touched, offsets beyond 2**31 elements arrive, no schedule changes a bit.

What the kernels write (results, partial sums) lies between protected pages in every test of this folder.
"""

import pytest
import torch

from tests import ffn_semantics as semantics
from tests.fences import huge
from tests.ffn_semantics import FAR, block


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (65, 9, 67, 5), (33, 40, 72, 16), (70, 64, 130, 128)], ids=str)
def test_no_byte_outside(sizes, save, dtype):
    semantics.assert_no_byte_outside("cuda", sizes, save, dtype)


@pytest.mark.parametrize("sizes", [(1040, 8, 9, 7), (1040, 16, 8, 8)], ids=str)
def test_no_byte_outside_of_cut_sums(sizes):
    semantics.assert_no_byte_outside("cuda", sizes, True, torch.float32)


@pytest.fixture(scope="module")
def space():
    """Room for a tensor of more than 2**31 elements, taken up only where it is written."""
    return huge(FAR + 2**17, torch.float32)


@pytest.mark.parametrize("name", ["x", "w1", "w2", "gate", "dy"])
def test_arguments_with_far_rows(space, name):
    semantics.assert_far_rows_arrive("cuda", name, space)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(70, 72, 80, 66), (1100, 8, 9, 8)], ids=str)
def test_no_schedule_changes_a_bit(sizes, dtype, simt):
    """Random orders of threads and of up to 7 blocks at once; tiles that wait for one another would show."""
    given = block(*sizes, dtype, gated=True)
    simt.configure(0, multiprocessors=3, resident=1)
    simt.assert_schedules_agree("ffn", given, range(1, 13), multiprocessors=3, most=7)
