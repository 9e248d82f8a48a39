"""Compiles a Triton kernel for a GPU that is not there, and reads off its machine code what it needs."""

import functools
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
MATRIX = ("HMMA", "HGMMA", "UTCHMMA", "IMMA", "IGMMA")  # what multiplies on matrix units
FUSED = ("FFMA", "FFMA2")  # without them; sm_100 multiplies pairs
COUNTED = ("LDL", "STL", *MATRIX, "LDG", "STG", "LDGSTS", "ATOM", "ATOMG", "RED")


def compile_kernel(kernel, types, constexprs, arch, num_warps, max_registers=None, fused=False):
    """The kernel as the launchers compile it: no argument is specialised.

    Args:
        kernel: a @triton.jit or @gluon.jit function.
        types: argument -> Triton's type ("*bf16", "i64", "fp32"), or None for an argument that is None.
        constexprs: constexpr argument -> value.
        arch: 80, 90 or 100.
        num_warps: as in the kernel's Config.
        max_registers: the same; None: what the compiler takes.
        fused: whether multiplications and sums are, as the launcher's enable_fp_fusion says.
    """
    names = [parameter.name for parameter in kernel.params]
    signature = {name: "constexpr" if types.get(name) is None else types[name] for name in names}
    constants = {(names.index(name),): constexprs.get(name) for name in names if signature[name] == "constexpr"}
    make = GluonASTSource if kernel.is_gluon() else ASTSource
    source = make(fn=kernel, signature=signature, constexprs=constants, attrs={})
    options = {"num_warps": num_warps, "enable_fp_fusion": fused, "maxnreg": max_registers}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def figures(compiled, products=()):
    """Registers, bytes of stack and of shared memory, and how often each instruction of COUNTED occurs.

    Products of warp groups that are waited for one by one, which takes several times as long, are told; none should be.

    With ``products``, the instructions that multiply, also how often the loops of a kernel with a stack that hold one
    touch it.
    """
    usage, code = _read(compiled)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    registers, stack, shared, local = map(int, found.groups())
    # SHARED is the static part, metadata.shared what the launch asks for
    counts = Counter(_INSTRUCTION.findall(code))
    in_loops = {}
    if stack and products:
        loops = _main_loops(code, products)
        assert loops, f"no loop holds {' or '.join(products)}"
        in_loops["stack in loops"] = sum(loop.get("LDL", 0) + loop.get("STL", 0) for loop in loops)
    return {
        "registers": registers,
        "stack": stack,
        "local": local,
        "shared": max(shared, compiled.metadata.shared),
        **{name: counts[name] for name in COUNTED if counts[name]},
        **({"products one by one": counts["HGMMA"]} if _one_by_one(compiled.asm["ptx"], code) else {}),
        **in_loops,
    }


def _one_by_one(ptx, code):
    """Whether the assembler waits for each HGMMA, where PTX has groups of several; it says so in words (C7510 ff.)."""
    ends = [("gsb0" in line) for line in code.splitlines() if re.search(r"\bHGMMA\b", line)]
    return bool(ends) and all(ends) and ptx.count("wgmma.mma_async") > ptx.count("wgmma.commit_group")


def whole(compiled):
    """How many of the loads and stores of a compiled kernel take 16 bytes: {"LDG.128": ..., "STG.128": ...}."""
    found = Counter(re.findall(r"\b(LDG|STG)\.E\.128\b", _read(compiled)[1]))
    return {f"{name}.128": found[name] for name in ("LDG", "STG") if found[name]}


def narrowest_copy(compiled):
    """The fewest bytes that a thread copies at once into shared memory, None without such copies."""
    copies = re.findall(r"\bLDGSTS\.(\S+)", _read(compiled)[1])
    return min(
        (next((int(n) // 8 for n in words.split(".") if n in ("64", "128")), 4) for words in copies), default=None
    )


def draws(compiled, products):
    """How many products of 32 by 32 bits each of the loops that multiply has: 20 for every four random numbers."""
    loops = _main_loops(_read(compiled)[1].replace("IMAD.WIDE.U32", "WIDE").replace("IMAD.HI.U32", "WIDE"), products)
    return [loop.get("WIDE", 0) for loop in loops]


def _main_loops(code, products):
    """How often the instructions of COUNTED and of ``products`` occur in each innermost loop that holds a product.

    Args:
        code: of _read().
        products: the instructions that multiply, such as ("HGMMA",).
    """
    lines, labels, loops = code.splitlines(), {}, []
    for number, line in enumerate(lines):
        if found := re.match(r"(\.L_x_\d+):", line):
            labels[found[1]] = number
        elif (found := re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)) and found[1] in labels:
            loops.append((labels[found[1]], number))
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    counts = [Counter(_INSTRUCTION.findall("\n".join(lines[first:last]))) for first, last in inner]
    kept = {*COUNTED, *products, "WIDE"}
    return [{k: n for k, n in count.items() if k in kept} for count in counts if any(count[p] for p in products)]


_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z0-9]+)", re.MULTILINE)


@functools.lru_cache(maxsize=1)
def _read(compiled):
    """What cuobjdump and nvdisasm say of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return _output(TOOLS / "cuobjdump", "-res-usage", file.name), _output(TOOLS / "nvdisasm", "-c", file.name)


def _output(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
