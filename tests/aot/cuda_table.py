"""What the CUDA kernels need of a GPU, read off the machine code that this build's tfm_kernels._cuda holds.

python -m tests.aot.cuda_table    writes tests/aot/cuda_kernels.json anew, from a build for the default architectures
"""

import json
import re
import subprocess
from collections import Counter
from pathlib import Path

from tests.aot.sass import TOOLS
from tfm_kernels import _library

FILE = Path(__file__).with_name("cuda_kernels.json")
ARCHITECTURES = ("80", "90a")  # of the committed table
# families of instructions that are counted, each with the width and kind that follow its name
COUNTED = (
    "LDG",
    "STG",
    "LDL",
    "STL",
    "ATOM",
    "ATOMG",
    "RED",
    "LDS",
    "STS",
    "BAR",
    "SHFL",
    "HMMA",
    "HGMMA",
    "LDGSTS",
    "LDSM",
)


def measure():
    """The key "sm_80 kernel<...>" -> registers, stack, local, shared (the static part), instructions by name."""
    usage = _cuobjdump("-res-usage")
    code = _cuobjdump("-sass")
    found = {}
    for arch, part in _by_arch(usage):
        for name, words in re.findall(r"Function (\S+):\n\s+(.*)", part):
            numbers = dict(re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", words))
            keys = {"registers": "REG", "stack": "STACK", "local": "LOCAL", "shared": "SHARED"}
            found[arch, name] = {key: int(numbers[word]) for key, word in keys.items()}
    for arch, part in _by_arch(code):
        for piece in part.split("Function : ")[1:]:
            names = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_.]+)", piece)
            counts = Counter(name for name in names if name.split(".")[0] in COUNTED)
            found[arch, piece.split()[0]] |= dict(sorted(counts.items()))
    plain = _demangle([name for _, name in found])
    return {f"sm_{arch} {plain[name]}": values for (arch, name), values in sorted(found.items())}


def architectures():
    """Those that the build holds, "80 90a"; None where there is none."""
    extension = _library.cuda_extension
    return None if extension is None else tuple(extension.build_info()["architectures"].split())


def _by_arch(text):
    """("90", what is said of it) for every image."""
    pieces = re.split(r"^arch = sm_(\d+)\w*$", text, flags=re.MULTILINE)
    return zip(pieces[1::2], pieces[2::2], strict=True)


def _cuobjdump(option):
    command = [TOOLS / "cuobjdump", option, _library.cuda_extension.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout


def _demangle(names):
    """Mangled name -> kernel<its arguments>, without namespaces."""
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    plain = {}
    for name, words in zip(names, done.stdout.splitlines(), strict=True):
        words = re.sub(r"tfm_kernels::|\(anonymous namespace\)::|^void ", "", words)
        plain[name] = re.sub(r"\(\w+\)(?=\d|true|false)", "", words.rsplit("(", 1)[0])
    return plain


def load():
    """The committed figures."""
    return json.loads(FILE.read_text())


def main():
    """Writes the file, one line a kernel."""
    assert architectures() == ARCHITECTURES, f"needs a build for {' '.join(ARCHITECTURES)}, got {architectures()}"
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in measure().items())
    cuda = _library.cuda_extension.build_info()["cuda"]
    FILE.write_text(f'{{\n "cuda": {json.dumps(cuda)},\n "kernels": {{\n{lines}\n }}\n}}\n')


if __name__ == "__main__":
    main()
