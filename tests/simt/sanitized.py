"""The CUDA kernels and their bindings on the CPU under AddressSanitizer and UndefinedBehaviorSanitizer.

It judges nothing: a finding of the sanitizer ends the process. Numbers are judged by the tests beside this file.

    python -m tests.simt.sanitized
"""

import os
import subprocess
import sys

from tests.simt.build import ROOT, build

EVERY = {"norm": 3, "attention": 10, "ffn": 6}  # of the contract's cases
SHAPES = ((5, 512), (5, 520), (3, 1023), (7, 1024), (3, 1025), (2, 2056), (2, 8193), (2, 16392))


def watched(path) -> None:
    """Some cases of the contract list, every launch, and a word about how many."""
    import torch

    from tests.cases import CASES, run_case
    from tests.cuda_on_cpu import answer_for_cpu_tensors
    from tests.simt.library import Simt
    from tfm_kernels.testing import run

    simt, count = Simt(path), 0
    answer_for_cpu_tensors(dict.__setitem__)
    cases = []
    for op, every in EVERY.items():
        cases += [case for case in CASES if op in case.op and case.levels["dtype"] != "f64"][::every]
    for count, case in enumerate(cases, 1):
        simt.configure(seed=count, multiprocessors=1 + count % 3, resident=1 + count % 4)
        run_case(case, "cuda")
    for rows, width in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            x, residual = torch.randn(2, rows, width).to(dtype)
            options = {"weight": torch.randn(width), "dropout_p": 0.3, "seed": torch.tensor(count)}
            run("add_layer_norm", {"x": x, "residual": residual, **options}, "cuda")
            count += 1
    for d in (100, 256):
        for dtype in (torch.float32, torch.bfloat16):
            q, k, v = torch.randn(3, 1, 2, 70, d).to(dtype)
            run("attention", {"query": q, "key": k, "value": v, "mask": torch.rand(70, 70) < 0.7}, "cuda")
            count += 1
    print(f"{count} calls, {simt.launches()} launches, no finding")


def main() -> int:
    """Builds, and runs it in a process in which the sanitizers come first."""
    path = build(sanitized=True)
    libraries = [
        subprocess.run(["c++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    environment = {**os.environ, "LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0"}
    command = [sys.executable, "-m", "tests.simt.sanitized", str(path)]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    if len(sys.argv) == 2:
        watched(sys.argv[1])
    else:
        sys.exit(main())
