"""csrc/cuda as nvcc compiles it, launchers and all, for CPU tensors: what it launches, the machine runs."""

import ctypes
import gc
import re

import torch

from tests.ptx.driver import Fault, Launch, storages

LAUNCHED = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), ctypes.c_uint, ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_void_p),
)  # fmt: skip


def kernels(module):
    """Name -> the text of a PTX module of several kernels, with the others left out."""
    entry = r"(?:\.visible |\.weak )*\.entry (\w+)"
    head, *parts = re.split(rf"(?m)(?=^{entry})", module)[::2]
    files = "".join(re.findall(r"(?m)^\s*\.file.*\n", module))
    return {re.match(entry, part)[1]: head + part + files for part in parts}


class Cuda:
    """Loading it registers the "cuda" operators for CPU tensors, in this process for good.

    Attributes:
        machine: the Machine that runs what they launch.
        text: what a kernel's PTX is replaced by: a function of its name and text.
    """

    def __init__(self, path, machine):
        torch.ops.load_library(str(path))
        self._library = ctypes.CDLL(str(path))
        self._library.cuda_memory.argtypes = [ctypes.c_uint64, ctypes.c_void_p]
        self._library.cuda_begin.argtypes = [LAUNCHED, ctypes.c_int]
        self._launched = LAUNCHED(self._launch)
        self._texts = {}  # of kernels, by name
        for module in re.split(r"(?m)^(?=\.version)", path.with_suffix(".ptx").read_text())[1:]:
            self._texts |= kernels(module)
        self._programs = {}
        tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.is_cpu]
        self._kept = [
            t for t in tensors if t.layout == torch.strided
        ]  # of tests' modules; the library knows newer ones
        self._older = storages(self._kept)
        self.machine = machine
        self.begin()

    def begin(self, multiprocessors=2):
        """Sets how many multiprocessors launchers find."""
        self._library.cuda_begin(self._launched, multiprocessors)
        self.text = lambda name, text: text

    def program(self, name):
        """The Program of a kernel."""
        text = self.text(name, self._texts[name])
        if text not in self._programs:
            self._programs[text] = self.machine.read(text)
        return self._programs[text]

    def memory(self, parameters):
        """(first, last) of each tensor that one of the words points into."""
        words, newer = memoryview(parameters).cast("Q"), (ctypes.c_uint64 * 2)()
        found = {tuple(newer) for word in words if self._library.cuda_memory(word, newer)}
        found |= {(first, last) for first, last in self._older if any(first <= word < last for word in words)}
        return sorted(found)

    def _launch(self, name, grid, threads, shared, arguments):
        try:
            program = self.program(name.decode())
            parameters = ctypes.string_at(arguments[0], self.machine.parameter_bytes(program))
            shown = re.findall(r"[a-z_]+_kernel", name.decode())[-1]
            memory = self.memory(parameters)
            self.machine.launch(Launch(shown, program, tuple(grid[:3]), threads, shared, [parameters], memory))
            return 0
        except Exception as error:  # no exception crosses C++; the operator raises its words
            words = str(error) if isinstance(error, Fault) else repr(error)
            self._library.cuda_says(words.encode())
            return 1
