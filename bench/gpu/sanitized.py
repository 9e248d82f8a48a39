"""python -m bench.gpu.sanitized STEM BACKEND: the smallest call of each branch, for compute-sanitizer to watch."""

import sys

import torch

from tfm_kernels.testing import run

from . import keys
from .subjects import SUBJECTS


def main(stem: str, backend: str) -> None:
    keys.settle()
    (subject,) = (one for one in SUBJECTS if (one.stem, one.backend) == (stem, backend))
    for op, inputs in subject.branches("cuda").values():
        run(op, inputs, backend)
    torch.cuda.synchronize()
    print("ran every branch")


if __name__ == "__main__":
    main(*sys.argv[1:])
