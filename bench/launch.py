"""python -m bench.launch: what a Triton op costs the host until the driver is called; needs Triton, but no GPU.

python -m bench.launch               every op: the first call in a process, and a warm one
python -m bench.launch --op ffn      one of them

In: the public function's checks and choice, the operator, our launcher, Triton's binding of the arguments and its
look-up of the kernel, which is compiled for an H200. Not in: loading the code, Triton's C launcher with cuLaunchKernel,
and switching to the tensors' device; `python -m bench.gpu` times whole calls where there is a GPU.

first, compiling: an empty cache on disk; first, from disk: the next process finds what that one compiled. Both import
what a call needs, Triton too. planned: each call planned by our launcher, as the first two of a shape are, median of
300; warm: repeated from memory, as all others are.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tfm_kernels import Mask, _library, ops
from tfm_kernels.bench import record

from . import places

CALLS = 300


def norm(op: str) -> Callable[[], Any]:
    """64 rows of 512 features, so that tensors cost nothing; add_* with dropout."""
    x, weight = torch.empty(64, 512, dtype=torch.bfloat16).requires_grad_(), torch.empty(512, dtype=torch.bfloat16)
    more: dict[str, Any] = {}
    if op.startswith("add"):
        more = {"residual": x.detach(), "dropout_p": 0.1, "seed": torch.tensor(1)}
    return lambda: getattr(ops, op)(x, weight=weight, backend="triton", **more)


def ffn() -> Any:
    """64 rows, 128 to 256 features, all options."""
    x, w1, w2 = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((64, 128), (256, 128), (128, 256)))
    b1, b2 = (torch.empty(n, dtype=torch.bfloat16) for n in (256, 128))
    options = {"activation": "gelu", "gate": w1, "dropout_p": 0.1, "seed": torch.tensor(1), "backend": "triton"}
    x.requires_grad_()
    return lambda: ops.ffn(x, w1, b1, w2, b2, **options)


def attention() -> Any:
    """2 heads, 64 queries and keys of 64 features, causal, with dropout."""
    q, k, v = (torch.empty(1, 2, 64, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    options = {"dropout_p": 0.1, "seed": torch.tensor(1), "backend": "triton"}
    return lambda: ops.attention(q, k, v, Mask.causal(), **options)


# op -> function that builds the call
CALL: dict[str, Callable[[], Callable[[], Any]]] = {
    "layer_norm": lambda: norm("layer_norm"),
    "add_rms_norm": lambda: norm("add_rms_norm"),
    "attention": attention,
    "ffn": ffn,
}


# architecture -> bytes of shared memory that a block may have
SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}


def host_driver(arch: int = 90) -> SimpleNamespace:
    """What Triton asks of a GPU's driver, without one: kernels are compiled for ``arch``, bound, and not launched."""
    from triton.backends.compiler import GPUTarget

    loaded = (1, 1, 0, 0, 1024)  # module, function, registers, spills, threads
    utils = SimpleNamespace(
        load_binary=lambda name, code, shared, device: loaded,
        get_device_properties=lambda device: {"max_shared_mem": SHARED[arch]},
    )
    return SimpleNamespace(
        utils=utils,
        launcher_cls=lambda source, metadata: lambda *arguments: None,
        get_current_device=lambda: arch,  # Triton keeps what it compiled by device
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
    )


@contextmanager
def host_only(instead: Any = None) -> Iterator[None]:
    """Inside, Triton's launchers take tensors of the CPU as a GPU's, and stop where the driver would be called.

    Args:
        instead: what is called instead of the driver, None for host_driver().
    """
    from triton.runtime.driver import driver

    from tfm_kernels.triton import _launch

    before = driver._active
    driver.set_active(instead or host_driver())
    try:
        with (
            mock.patch.object(_launch, "check_device", lambda op, x: None),
            mock.patch.object(_library, "triton_interprets", lambda: True),
        ):
            yield
    finally:
        driver._active = before


def seconds(op: str) -> dict[str, float]:
    """Of the first call of this process and of a warm one, without a gradient and with one, and of its backward."""
    call = CALL[op]()
    found: dict[str, float] = {}
    start = time.perf_counter()
    with host_only():
        with torch.no_grad():
            call()
            found["first"] = time.perf_counter() - start
            with _library.plans_anew():
                found["planned"] = _median(call)
            found["warm"] = _median(call)
        found["warm, recording a graph"] = _median(call)
        outputs = call()
        y = outputs[0] if isinstance(outputs, tuple) else outputs
        x, dy = _leaf(y), torch.empty_like(y)
        start = time.perf_counter()
        torch.autograd.grad(y, x, dy, retain_graph=True)
        found["first backward"] = time.perf_counter() - start
        found["warm backward"] = _median(lambda: torch.autograd.grad(y, x, dy, retain_graph=True))
    return found


def _leaf(y: torch.Tensor) -> torch.Tensor:
    """The one tensor that y's graph began with."""
    function = y.grad_fn
    assert function is not None
    return next(next_.variable for next_, _ in function.next_functions if hasattr(next_, "variable"))


def _median(call: Callable[[], Any]) -> float:
    found = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def measure(op: str) -> dict[str, float]:
    """seconds() of two processes: with an empty cache on disk, and with what the first left there."""
    with tempfile.TemporaryDirectory() as cache:
        found = []
        for _ in range(2):
            environment = {**os.environ, "TRITON_CACHE_DIR": cache}
            environment.pop("TRITON_INTERPRET", None)
            command = [sys.executable, "-m", "bench.launch", "--child", op]
            done = subprocess.run(command, cwd=places.ROOT, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"bench.launch: {op}: {done.stderr[-2000:]}")
            found.append(json.loads(done.stdout))
    compiling, later = found
    return {"compiling": compiling["first"], "compiling backward": compiling["first backward"], **later}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="bench.launch", description=__doc__.splitlines()[0])
    parser.add_argument("--op", choices=tuple(CALL), action="append", help="one op (default: all)")
    parser.add_argument("--json", action="store_true", help="print seconds as JSON")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write seconds and machine into a file, too")
    parser.add_argument("--child", choices=tuple(CALL), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(seconds(options.child)))
        return 0
    found = {op: measure(op) for op in options.op or CALL}
    print(json.dumps(found) if options.json else table(found))
    if options.out is not None:  # after the print: a file that cannot be written loses nothing
        data = {**record.environment(), "triton": version("triton"), "ops": found}
        options.out.write_text(json.dumps(data, indent=1) + "\n")
    return 0


def table(found: dict[str, dict[str, float]]) -> str:
    """Markdown."""
    lines = [
        "| op | first, compiling | first, from disk | planned | warm | recording a graph | backward first "
        "| backward warm |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for op, of in found.items():
        cells = (
            f"{of['compiling']:.2f} s", f"{1e3 * of['first']:.0f} ms", f"{1e6 * of['planned']:.0f} us",
            f"{1e6 * of['warm']:.0f} us", f"{1e6 * of['warm, recording a graph']:.0f} us",
            f"{1e3 * of['first backward']:.0f} ms", f"{1e6 * of['warm backward']:.0f} us",
        )  # fmt: skip
        lines.append(f"| `{op}` | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
