"""Calls that tfm_kernels/triton/_replay.py repeats, for its tests; the fixture ``told`` tells their launches."""

import torch
from triton.compiler import CompiledKernel

from tfm_kernels import _library
from tfm_kernels.triton import _launch, _replay
from tfm_kernels.triton._sums import sum_rows_kernel

OUTSIDE = torch.ones(1)  # of no call


class Compiled(CompiledKernel):
    """Stands for a compiled kernel; launched past its JITFunction, it tells so."""

    module = None  # as of one that no GPU has loaded

    def __init__(self, kernel, tell):
        self.kernel, self.tell = kernel, tell

    def __getitem__(self, grid):
        return lambda *arguments: self.tell((self.kernel, grid, list(arguments), True))


def launch(*tensors, rows=1):
    _launch.launch(sum_rows_kernel, (1,), **dict(zip(sum_rows_kernel.arg_names, (*tensors, rows), strict=False)))


def repeated(told, function, *calls):
    """(launches, result) of each call, the last of which is of the same key as two before it."""
    launcher, found = _replay.Launcher(function, _library._launch_key), []
    for call in calls:
        told.clear()
        result = launcher(*call)
        found.append((list(told), result))
    return found
