"""int8_linear's Triton kernels on a GPU: launches, branches, 2**31 elements, what they should take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tests.cases import Case
from tfm_kernels import ops
from tfm_kernels.bench.limits import matrix_rate
from tfm_kernels.bench.ops import int8_linear as bench_int8_linear
from tfm_kernels.bench.shapes import Int8Linear
from tfm_kernels.bench.subject import Group
from tfm_kernels.testing.contract import bits_equal

from .subject import GpuSubject, Inputs, nan_stays_in_its_row

# Said before any measurement: shares of the limits, how many times a library's product of bfloat16 tensor cores
# multiply integers, seconds for each launch and how many there are
SHARE = 0.70
INTEGERS = 2.0
LAUNCH = 2.5e-6
LAUNCHES = {False: 2, True: 3}  # dynamic


def cases() -> Sequence[Case]:
    """Every launch of pick_config, then data, layouts and rows of every kind."""
    return [*_launches(), *_others()]


def _case(dtype: str, rows: tuple[int, ...], k: int, n: int, dynamic: bool, **levels: Any) -> Case:
    given = {"dtype": dtype, "data": "randn", "layout": "contiguous", "rows": rows, "k": k, "n": n, "bias": True}
    return Case("int8_linear", {**given, "dynamic": dynamic, **levels})


def _launches() -> list[Case]:
    """More tiles than an H200 has multiprocessors, and fewer: each tile, whole k and parts of it, odd sizes."""
    sizes = (
        (4352, 96, 1040), (2304, 96, 1040), (1100, 64, 530), (60, 1040, 200), (9, 96, 8464), (9, 1040, 200),
        (1100, 97, 531), (60, 1041, 200), (9, 97, 8465), (9, 1041, 201),
    )  # fmt: skip
    return [
        _case(dtype, (rows,), k, n, dynamic, bias=number % 3 > 0)
        for dtype in ("bf16", "f32", "f16")
        for dynamic in (False, True)
        for number, (rows, k, n) in enumerate(sizes)
    ]


def _others() -> list[Case]:
    found: list[Case] = []
    for data in ("heavy", "outlier", "constant_rows", "mean_1000", "integers", "extremes", "subnormals"):
        for number, dtype in enumerate(("bf16", "f32", "f16")):
            rows = ((5,), (2, 17), (130,))[number]
            found += [_case(dtype, rows, 80, 72, dynamic, data=data) for dynamic in (False, True)]
    for layout in ("transposed", "sliced", "misaligned"):
        found += [_case("bf16", (2, 17), 80, 72, dynamic, layout=layout) for dynamic in (False, True)]
    return [*found, *(_case("f32", rows, 33, 7, True) for rows in ((), (0,), (1,)))]


def _inputs(device: str, dtype: torch.dtype, rows: int, k: int, n: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(rows + k)
    weight = torch.randint(-128, 128, (n, k), generator=g, dtype=torch.int8)
    scale = (0.5 + torch.rand(n, generator=g)) / (74 * k**0.5)
    x, bias = torch.randn(rows, k, generator=g).to(dtype), torch.randn(n, generator=g).to(dtype)
    return {name: t.to(device) for name, t in {"x": x, "weight": weight, "scale": scale, "bias": bias}.items()}


def branches(device: str) -> Mapping[str, tuple[str, Inputs]]:
    """Many rows and few, whole k and parts of it, aligned and not; weights alone and rows rounded, bias and none."""
    found: dict[str, tuple[str, Inputs]] = {}
    for rows, k, n in ((300, 96, 8300), (70, 400, 301), (70, 33, 131), (9, 400, 24), (9, 401, 25)):
        for dtype in (torch.bfloat16, torch.float32):
            given = _inputs(device, dtype, rows, k, n)
            for dynamic in (False, True):
                name = f"int8_linear {rows} {k}-{n} {str(dtype).removeprefix('torch.')}{' dynamic' * dynamic}"
                found[name] = "int8_linear", {**given, "dynamic": dynamic}
        found[f"{name} without bias"] = "int8_linear", {**found[name][1], "bias": None}
    return found


def integers_are_exact(device: str) -> None:
    """With steps of 1 y is the product of the integers itself, of every tile and however k is cut."""
    for rows, k, n in ((4352, 96, 1040), (300, 96, 520), (60, 1040, 200), (9, 1040, 200), (9, 1041, 201)):
        g = torch.Generator().manual_seed(rows)
        x = torch.randint(-127, 128, (rows, k), generator=g)
        x[:, 0] = 127
        weight = torch.randint(-9, 10, (n, k), generator=g)
        given = {"x": x.float(), "weight": weight.to(torch.int8), "scale": torch.ones(n)}
        y = ops.int8_linear(**{name: t.to(device) for name, t in given.items()}, dynamic=True, backend="triton")
        assert torch.equal(y.cpu(), (x.float() @ weight.float().T)), f"{rows} rows of {k}"


def beyond_int32_rows(device: str) -> None:
    """The last rows of x, and of y, of more than 2**31 elements are those of a call of their own, bit for bit."""
    width, last = 256, 70_000
    rows = 2**31 // width + 9
    given = _inputs(device, torch.float16, 1, width, 264)
    x = torch.empty((rows, width), device=device, dtype=torch.float16).normal_()
    for dynamic in (False, True):
        call = partial(ops.int8_linear, **{**given, "dynamic": dynamic, "backend": "triton"})
        assert bits_equal(call(x=x)[-last:], call(x=x[-last:])), f"the last rows, dynamic={dynamic}"


def beyond_int32_weights(device: str) -> None:
    """The last of weights of more than 2**31 elements are those of a call of their own, bit for bit."""
    width, last = 4096, 20_000
    out = 2**31 // width + 9
    given = _inputs(device, torch.float16, 9, width, 1)
    weight = torch.randint(-128, 128, (out, width), device=device, dtype=torch.int8)
    scale, bias = (torch.full((out,), 0.01, device=device, dtype=dtype) for dtype in (torch.float32, torch.float16))
    for dynamic in (False, True):
        call = partial(ops.int8_linear, given["x"], dynamic=dynamic, backend="triton")
        whole, alone = call(weight, scale, bias), call(weight[-last:], scale[-last:], bias[-last:])
        assert bits_equal(whole[:, -last:], alone), f"the last features, dynamic={dynamic}"


def _speed() -> tuple[Int8Linear, ...]:
    def n(rows: int, width: int, out: int, dynamic: bool = False, **options: Any) -> Int8Linear:
        given = {"dtypes": ("bfloat16",), **options}
        return Int8Linear(rows=rows, width=width, out=out, dynamic=dynamic, **given)

    return (
        n(1, 4096, 4096, headline=True),
        n(16, 4096, 11008, headline=True),
        n(1, 1024, 4096),
        n(8, 768, 50257),
        n(64, 4096, 4096),
        n(4096, 4096, 4096),
        n(16, 4096, 4096, dtypes=("float32",)),
        n(16, 4096, 11008, True),
        n(2048, 4096, 4096, True, headline=True),
        n(8192, 4096, 11008, True, headline=True),
        n(8192, 1024, 4096, True, dtypes=("bfloat16", "float32")),
    )


def _proof(case: Int8Linear) -> Int8Linear:
    """Rows enough for the launch of the timed case, few enough for a float64 judge."""
    return replace(case, rows=min(case.rows, 2048), out=min(case.out, 11008))


def predicted(group: Group, direction: str, limits: Mapping[str, Any]) -> float:
    """The product at a share of the limit, or the traffic of few rows, beside the launches."""
    case, itemsize = group.case, getattr(torch, group.dtype).itemsize
    rate = matrix_rate(dict(limits), "bfloat16" if case.dynamic else group.dtype) * (INTEGERS if case.dynamic else 1.0)
    moved = group.subject.bytes_moved(case, itemsize, direction) / max(limits["copy"].values())
    return LAUNCHES[case.dynamic] * LAUNCH + max(group.subject.flops(case, direction) / rate, moved) / SHARE


TRITON = GpuSubject(
    stem="int8_linear",
    backend="triton",
    cases=cases,
    checks={
        "int8_linear integers are exact": integers_are_exact,
        "int8_linear NaN in a row": partial(nan_stays_in_its_row, branches, "int8_linear", "triton"),
    },
    branches=branches,
    large={
        "int8_linear beyond 2**31, rows": beyond_int32_rows,
        "int8_linear beyond 2**31, weights": beyond_int32_weights,
    },
    speed=replace(bench_int8_linear.SUBJECT, cases=_speed(), proof=_proof),
    predicted=predicted,
)
