"""Triton's launches, run by the machine: kernels compiled as for a GPU that is there, up to its assembler's input."""

import ctypes
import struct
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import triton

from bench.launch import host_driver, host_only
from tests.ptx.build import ROOT
from tfm_kernels.triton import _launch

KEPT = ROOT / "build" / "ptx-kernels"  # where Triton keeps what it compiled for the machine


class Fault(RuntimeError):
    """What a GPU would not do, or may do or not."""


@dataclass(frozen=True)
class Program:
    """A kernel's PTX, and the machine's own form of it."""

    text: str
    handle: int


@dataclass(frozen=True)
class Launch:
    """A kernel with all that it was started with.

    Attributes:
        name: the kernel's.
        program: the Program.
        grid: blocks along three axes.
        threads: of a block.
        shared: bytes of shared memory of a block.
        parameters: bytes of each, a multiple of 8, in order.
        memory: (first, last) of each piece of global memory that the kernel may touch.
        tensors: what is to live as long as the launch.
    """

    name: str
    program: Program
    grid: tuple
    threads: int
    shared: int
    parameters: list
    memory: list
    tensors: list = ()


def storages(tensors):
    """(first, last) of each tensor's memory."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return [(first, first + size) for first, size in found.items() if size]


class Traffic(ctypes.Structure):
    """What a kernel's accesses cost.

    Attributes:
        global_bytes: of global memory that its threads asked for.
        global_sectors: of 32 bytes that they lie in, instruction by instruction of each warp.
        shared_waves: times that shared memory was busy.
        shared_least: times that it would have been if no two words of one bank were asked for at once.
        issued: instructions of warps, as PTX counts them.
    """

    _fields_ = [
        (name, ctypes.c_uint64) for name in ("global_bytes", "global_sectors", "shared_waves", "shared_least", "issued")
    ]


class Machine:
    """Runs PTX.

    Attributes:
        launches: every Launch that ran, where ``keep`` is set; else their names.
        keep: whether launches are kept, and with them their tensors.
        seed: of the order of blocks and warps.
        traffic: kernel -> the Traffic of its launches; None where it is not counted, which takes time.
    """

    def __init__(self, path):
        self._library = ctypes.CDLL(str(path))
        self._library.ptx_error.restype = ctypes.c_char_p
        self._library.ptx_read.restype = ctypes.c_void_p
        self._library.ptx_read.argtypes = [ctypes.c_char_p]
        self._library.ptx_parameters.argtypes = [ctypes.c_void_p]
        self._library.ptx_launch.argtypes = [
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_void_p,
            ctypes.c_uint, ctypes.c_uint64, ctypes.c_void_p,
        ]  # fmt: skip
        self.begin()

    def begin(self, seed=1, keep=False, count=False):
        """Forgets the launches until now."""
        self.launches, self.keep, self.seed, self.traffic = [], keep, seed, {} if count else None

    def read(self, text):
        """The Program of a PTX module with one kernel; a Fault where it has what the machine does not know."""
        handle = self._library.ptx_read(text.encode())
        if not handle:
            raise Fault(self._library.ptx_error().decode())
        return Program(text, handle)

    def parameter_bytes(self, program):
        """How many bytes of parameters a Program has."""
        return self._library.ptx_parameters(program.handle)

    def launch(self, launch):
        """Runs a kernel.

        Args:
            launch: the Launch.

        Raises:
            Fault: an access out of bounds, a race, a barrier that not all reach ...
        """
        self.launches.append(launch if self.keep else launch.name)
        parameters, expected = b"".join(launch.parameters), self.parameter_bytes(launch.program)
        if len(parameters) != expected:
            raise Fault(f"{launch.name} has {expected} bytes of parameters, and {len(parameters)} were given")
        ranges = [place for piece in launch.memory for place in piece]
        traffic = None if self.traffic is None else self.traffic.setdefault(launch.name, Traffic())
        failed = self._library.ptx_launch(
            launch.program.handle, (ctypes.c_uint32 * 3)(*launch.grid), launch.threads, launch.shared,
            parameters, (ctypes.c_uint64 * len(ranges))(*ranges), len(ranges) // 2, self.seed,
            None if traffic is None else ctypes.byref(traffic),
        )  # fmt: skip
        if failed:
            raise Fault(self._library.ptx_error().decode())


def packed(kind, value):
    """The 8 bytes of a parameter of Triton's type ``kind``: a pointer ("*bf16"), "fp32" or an integer."""
    if kind.startswith("*"):
        return struct.pack("<Q", value.data_ptr())
    return struct.pack("<f4x", value) if kind == "fp32" else struct.pack("<q", value)


def machine_driver(machine, arch):
    """What Triton asks of a GPU's driver; what it launches, the machine runs."""
    driver = host_driver(arch)
    files = {}  # of the kernel that is about to be loaded; load_binary is told its machine code alone

    def about_to_load(module, function, name, group, hash):
        files.update(group)

    def load_binary(name, code, shared, device):
        program = machine.read(Path(files[f"{name}.ptx"]).read_text())
        return program, program, 0, 0, 1024  # module, function, registers, spills, threads

    def launcher(source, metadata):
        kinds = source.signature.values()

        def launch(x, y, z, stream, program, options, described, enter, leave, *arguments):
            given = [(kind, a) for kind, a in zip(kinds, arguments, strict=True) if kind != "constexpr"]
            scratch = [bytes(8)] * 2  # Triton's own, for kernels that ask for memory; ours do not
            parameters = [packed(kind, value) for kind, value in given] + scratch
            tensors = [value for _, value in given if isinstance(value, torch.Tensor)]
            threads = 32 * metadata.num_warps
            memory = storages(tensors)
            machine.launch(
                Launch(metadata.name, program, (x, y, z), threads, metadata.shared, parameters, memory, tensors)
            )

        return launch

    driver.utils.load_binary, driver.launcher_cls, driver.about_to_load = load_binary, launcher, about_to_load
    return driver


def without_machine_code(backend, stages, options, language, capability):
    """triton.knobs' hook on a compilation: leaves out NVIDIA's assembler, which takes a third of the time."""
    stages["cubin"] = lambda source, metadata: source.encode()


@contextmanager
def gpu_of(machine, arch):
    """Inside, Triton's launchers take tensors of the CPU as a GPU's, and the machine runs what they launch.

    Args:
        machine: the Machine.
        arch: 80 or 90: what kernels are compiled for, and the GPU whose launches are taken.
    """
    driver, knobs, cache = machine_driver(machine, arch), triton.knobs.runtime, triton.knobs.cache
    with (
        host_only(driver),
        mock.patch.object(_launch, "capability", lambda x: divmod(arch, 10)),
        knobs.scope(),
        cache.scope(),
    ):
        cache.dir = str(KEPT)  # what is kept here a GPU cannot run
        knobs.kernel_load_start_hook = driver.about_to_load
        knobs.add_stages_inspection_hook = without_machine_code
        yield
