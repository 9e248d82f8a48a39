"""linear_cross_entropy's Triton kernels on a GPU: launches, branches, 2**31 elements, what they should take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tests.cases import Case, pairs_once
from tfm_kernels.bench.limits import matrix_rate
from tfm_kernels.bench.ops import linear_cross_entropy as bench_linear_cross_entropy
from tfm_kernels.bench.shapes import LinearCrossEntropy
from tfm_kernels.bench.subject import BACKWARD, FORWARD, Group
from tfm_kernels.testing import run
from tfm_kernels.testing.contract import Results, bits_equal
from tfm_kernels.testing.judge import judge

from .subject import GpuSubject, Inputs, nan_stays_in_its_row

# Said before any measurement: shares of the limits (the library's products, a copy), seconds for each launch, and how
# many there are: forward, backward, and of these for each chunk of CHUNK bytes of the logits' gradient
SHARE = {FORWARD: 0.60, BACKWARD: 0.60}
LAUNCH = 2.5e-6
LAUNCHES = {FORWARD: 4, BACKWARD: 8}
CHUNK, LAUNCHES_OF_A_CHUNK = 2**25, 4
AGAIN = 1.5  # the backward computes the logits too: three products for two


def cases() -> Sequence[Case]:
    """Every launch of pick_config first, then all pairs of the list once."""
    ours = [case for case in pairs_once() if case.op == "linear_cross_entropy" and case.levels["dtype"] != "f64"]
    return [*_launches(), *ours]


def _launches() -> list[Case]:
    """More tiles than an H200 has programs, and fewer: large tiles, small ones, odd sizes, cut sums, several chunks."""
    sizes = (
        (4100, 1032, 4360), (2100, 1032, 2112), (2100, 1032, 1100), (1100, 264, 1032), (64, 520, 2001), (60, 64, 520),
        (1300, 63, 1301), (70, 33, 131),
    )  # fmt: skip
    found: list[Case] = []
    for dtype in ("bf16", "f32", "f16"):
        for number, (rows, width, classes) in enumerate(sizes):
            levels = {
                "dtype": dtype, "data": "randn", "layout": "contiguous", "rows": (rows,), "k": width, "v": classes,
                "bias": number % 2 == 0, "ignored": "some", "ignore_index": -100,
                "label_smoothing": 0.1 * (number % 3 == 0), "reduction": ("mean", "none")[number % 2],
            }  # fmt: skip
            found.append(Case("linear_cross_entropy", levels))
    return found


def _new(device: str, dtype: torch.dtype, seed: int) -> Any:
    g = torch.Generator(device).manual_seed(seed)

    def new(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.empty(shape, device=device, dtype=dtype).normal_(generator=g).mul_(scale)

    return new


def branches(device: str) -> Mapping[str, tuple[str, Inputs]]:
    """Large tiles and several chunks, small ones, rows that are not aligned; all options and none."""
    found: dict[str, tuple[str, Inputs]] = {}
    for rows, width, classes in ((2200, 64, 8300), (70, 72, 301), (70, 63, 131)):
        for dtype in (torch.bfloat16, torch.float32):
            new, g = _new("cpu", dtype, width), torch.Generator().manual_seed(rows)
            target = torch.randint(classes, (rows,), generator=g)
            plain = {"x": new(rows, width), "weight": new(classes, width, scale=width**-0.5), "target": target}
            full: dict[str, Any] = {**plain, "bias": new(classes), "label_smoothing": 0.1}
            ignored = torch.rand(rows, generator=g) < 0.4
            ignored[rows // 2] = False  # whose x becomes NaN
            full["target"] = target.masked_fill(ignored, -100)
            label = f"{rows} {width}-{classes} {str(dtype).removeprefix('torch.')}"
            for what, inputs in (("plain", plain), ("bias smoothing ignored rows", full)):
                given = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in inputs.items()}
                found[f"linear_cross_entropy {what} {label}"] = "linear_cross_entropy", {**given, "reduction": "none"}
    return found


def rows_that_count_are_found(device: str) -> None:
    """They get the bits of a call without the others, which get zeros; more than live_rows_kernel looks at together."""
    new, rows, g = _new(device, torch.bfloat16, 3), 9000, torch.Generator().manual_seed(3)
    live = (torch.rand(rows, generator=g) < 0.3).to(device)
    x, weight, target = new(rows, 8), new(24, 8), torch.randint(24, (rows,), generator=g).to(device)
    dloss = new(rows).float()

    def outcome(x: torch.Tensor, target: torch.Tensor, dloss: torch.Tensor) -> Results:
        inputs = {"x": x, "weight": weight, "target": target, "reduction": "none"}
        return run("linear_cross_entropy", inputs, "triton", douts={"loss": dloss})

    among = outcome(x, target.masked_fill(~live, -100), dloss)
    alone = outcome(x[live], target[live], dloss[live])
    pairs = {"loss": (among.outputs["loss"], alone.outputs["loss"]), "dx": (among.grads["x"], alone.grads["x"])}
    for name, (t, of_alone) in pairs.items():
        assert t is not None and of_alone is not None and bits_equal(t[live], of_alone), f"{name} of rows that count"
        assert not bool(t[~live].any()), f"{name} of rows that are ignored"


def beyond_int32_rows(device: str) -> None:
    """The last rows of x of more than 2**31 elements are those of a call of their own, bit for bit.

    That call has rows enough for the same launches, so that both form their sums in one order.
    """
    new, classes, width, last = _new(device, torch.float16, 1), 300, 256, 150_000
    rows = 2**31 // width + 9
    weight, dloss = new(classes, width, scale=width**-0.5), new(rows).float()
    x, target = new(rows, width), torch.arange(rows, device=device) % classes

    def outcome(keep: slice) -> Results:
        inputs = {"x": x[keep], "weight": weight, "target": target[keep], "reduction": "none"}
        return run("linear_cross_entropy", inputs, "triton", douts={"loss": dloss[keep]})

    whole, alone = outcome(slice(None)), outcome(slice(-last, None))
    pairs = {"loss": (alone.outputs["loss"], whole.outputs["loss"]), "dx": (alone.grads["x"], whole.grads["x"])}
    for name, (t, of_whole) in pairs.items():
        assert t is not None and of_whole is not None and bits_equal(t, of_whole[-last:]), f"{name} of the last rows"


def beyond_int32_classes(device: str) -> None:
    """Of weights of more than 2**31 elements the last classes alone can be: they keep the contract of a small call."""
    new, rows, width, last = _new(device, torch.float16, 2), 33, 64, 500
    classes = 2**31 // width + 9
    weight, bias = new(classes, width, scale=width**-0.5), torch.zeros(classes, dtype=torch.float16, device=device)
    bias[:-last] = -torch.inf
    x, target = new(rows, width), torch.arange(rows, device=device) * 7
    given = {"x": x, "weight": weight, "bias": bias, "target": target + (classes - last), "reduction": "none"}
    found = run("linear_cross_entropy", given, "triton")
    small = {**given, "weight": weight[-last:], "bias": bias[-last:], "target": target}
    grads = {name: t if t is None or name == "x" else t[-last:] for name, t in found.grads.items()}
    judge("linear_cross_entropy", small, found.outputs, grads, found.douts, backend="triton").raise_broken()
    others = found.grads["weight"]
    assert others is not None and not bool(others[:-last].any()), "dweight of classes that cannot be"


def _speed() -> tuple[LinearCrossEntropy, ...]:
    def c(rows: int, width: int, classes: int, **options: Any) -> LinearCrossEntropy:
        given = {"dtypes": ("bfloat16",), **options}
        return LinearCrossEntropy(rows=rows, width=width, classes=classes, **given)

    return (
        c(8192, 512, 37000, label_smoothing=0.1, headline=True),
        c(8192, 1024, 33708, headline=True, compiled=True),
        c(8192, 1024, 33708, dtypes=("float16",)),
        c(2048, 1024, 33708, dtypes=("float32",)),
        c(4096, 4096, 128256, headline=True),
        c(8192, 768, 50257),
        c(8192, 768, 30522, ignored=0.85, headline=True),
        c(16, 1024, 33708),
    )


def _proof(case: LinearCrossEntropy) -> LinearCrossEntropy:
    """Rows and classes enough for the launches of the timed case, few enough for a float64 judge."""
    return replace(case, rows=min(case.rows, 2112), classes=min(case.classes, 8448))


def predicted(group: Group, direction: str, limits: Mapping[str, Any]) -> float:
    """The products, or the traffic of few rows, at the share of the limit that is aimed at, beside the launches."""
    rate, copied = matrix_rate(dict(limits), group.dtype), max(limits["copy"].values())
    case, itemsize, seconds = group.case, getattr(torch, group.dtype).itemsize, 0.0
    chunks = -(-case.rows * case.classes * itemsize // CHUNK)
    for one in (FORWARD, BACKWARD):
        if direction in (one, "both"):
            flops = group.subject.flops(case, one) * (AGAIN if one == BACKWARD else 1.0)
            launches = LAUNCHES[one] + (chunks * LAUNCHES_OF_A_CHUNK if one == BACKWARD else 0)
            limit = max(flops / rate, group.subject.bytes_moved(case, itemsize, one) / copied)
            seconds += launches * LAUNCH + limit / SHARE[one]
    return seconds


TRITON = GpuSubject(
    stem="linear_cross_entropy",
    backend="triton",
    cases=cases,
    checks={
        "linear_cross_entropy rows that count": rows_that_count_are_found,
        "linear_cross_entropy NaN in a row": partial(
            nan_stays_in_its_row, branches, "linear_cross_entropy", "triton"
        )
    },
    branches=branches,
    large={
        "linear_cross_entropy beyond 2**31, rows": beyond_int32_rows,
        "linear_cross_entropy beyond 2**31, classes": beyond_int32_classes,
    },
    speed=replace(bench_linear_cross_entropy.SUBJECT, cases=_speed(), proof=_proof),
    predicted=predicted,
)  # fmt: skip
