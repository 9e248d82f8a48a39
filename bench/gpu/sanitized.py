"""python -m bench.gpu.sanitized STEM: an op's smallest call of each branch, for compute-sanitizer to watch."""

import sys

import torch

from tfm_kernels.testing import run

from .subjects import SUBJECTS


def main(stem: str) -> None:
    for subject in SUBJECTS:
        if subject.stem == stem:
            for op, inputs in subject.branches("cuda").values():
                run(op, inputs, subject.backend)
    torch.cuda.synchronize()
    print("ran every branch")


if __name__ == "__main__":
    main(*sys.argv[1:])
