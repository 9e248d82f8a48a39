"""The built library in this process: its operators run csrc/cuda on CPU tensors, under a schedule that is set here."""

import ctypes

import torch

from tfm_kernels.testing.contract import run
from tfm_kernels.testing.exact import assert_same_bits


class Simt:
    """Runs csrc/cuda. Loading it registers the "cuda" operators for CPU tensors, in this process for good."""

    def __init__(self, path):
        torch.ops.load_library(str(path))
        self._library = ctypes.CDLL(str(path))
        self._library.simt_launches.restype = ctypes.c_long
        self.configure()

    def configure(self, seed=1, multiprocessors=2, resident=2):
        """Sets the schedule.

        Args:
            seed: of the die that says which thread goes on.
            multiprocessors: that the launchers find.
            resident: blocks that run at once.
        """
        self._library.simt_configure(ctypes.c_uint64(seed), multiprocessors, resident)

    def assert_schedules_agree(self, op, inputs, seeds, multiprocessors, most):
        """Runs an op under other schedules, of 1 to ``most`` blocks at once: outputs and gradients keep their bits."""
        expected = run(op, inputs, "cuda")
        for seed in seeds:
            self.configure(seed, multiprocessors, resident=1 + seed % most)
            found = run(op, inputs, "cuda", douts=expected.douts)
            assert_same_bits(expected.outputs | expected.grads, found.outputs | found.grads, f"{op}, schedule {seed}")

    def function(self, name, result):
        """A C function of the library; ``result`` is the type that it returns."""
        found = getattr(self._library, name)
        found.restype = result
        return found

    def launches(self):
        """Kernels started since the library was loaded."""
        return self._library.simt_launches()
