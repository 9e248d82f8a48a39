"""Compiles a Triton kernel for a GPU that is not there, and reads off its machine code what it needs."""

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
COUNTED = ("LDL", "STL", "HMMA", "HGMMA", "LDG", "STG", "LDGSTS", "ATOM", "ATOMG", "RED")


def compile_kernel(kernel, types, constexprs, arch, num_warps, max_registers=None):
    """The kernel as the launchers compile it: no argument is specialised, multiplications and sums are not fused.

    Args:
        kernel: a @triton.jit function.
        types: argument -> Triton's type ("*bf16", "i64", "fp32"), or None for an argument that is None.
        constexprs: constexpr argument -> value.
        arch: 80, 90 or 100.
        num_warps: as in the kernel's Config.
    """
    names = [parameter.name for parameter in kernel.params]
    signature = {name: "constexpr" if types.get(name) is None else types[name] for name in names}
    constants = {(names.index(name),): constexprs.get(name) for name in names if signature[name] == "constexpr"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs={})
    options = {"num_warps": num_warps, "enable_fp_fusion": False, "maxnreg": max_registers}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def figures(compiled):
    """Registers, bytes of stack and of shared memory, and how often each instruction of COUNTED occurs."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _output(TOOLS / "cuobjdump", "-res-usage", file.name)
        code = _output(TOOLS / "nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    registers, stack, shared, local = map(int, found.groups())
    # SHARED is the static part, metadata.shared what the launch asks for
    counts = Counter(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z0-9]+)", code, re.MULTILINE))
    return {
        "registers": registers,
        "stack": stack,
        "local": local,
        "shared": max(shared, compiled.metadata.shared),
        **{name: counts[name] for name in COUNTED if counts[name]},
    }


def _output(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
