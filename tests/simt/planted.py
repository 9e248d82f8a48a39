"""Builds csrc/cuda with one of the planted defects, and makes the calls that have to catch it.

python -m tests.simt.planted clean attention    builds csrc/cuda as it is and makes the calls of an op: exit code 0
python -m tests.simt.planted dropped_barrier    builds it with a defect: any other exit code
"""

import sys

import torch

from tests.cuda_on_cpu import answer_for_cpu_tensors
from tests.simt import attention_defects, defects, ffn_defects
from tests.simt.build import build
from tests.simt.library import Simt

DEFECTS = {**defects.DEFECTS, **attention_defects.DEFECTS, **ffn_defects.DEFECTS}
TRIALS = {"layer_norm": defects.trial, "attention": attention_defects.trial, "ffn": ffn_defects.trial}
FILES = {"ffn": ("ffn", "gemm")}  # how the files of an op begin that has more than its own


def main(name, stem=None):
    """Builds and tries."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    defect = DEFECTS.get(name)
    if defect is None:
        path = build()
    else:
        stem = defect.stem
        path = build(patched=(f"defect-{name}", FILES.get(stem, stem), {defect.file: defect.text()}))
    simt = Simt(path)
    answer_for_cpu_tensors(dict.__setitem__)
    print("begins", flush=True)
    TRIALS[stem](simt)
    print("passed", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
