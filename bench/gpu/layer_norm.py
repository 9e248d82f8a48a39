"""The norms' Triton and CUDA kernels on a GPU: launches, branches, more than 2**31 elements, what they should take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tests.cases import Case, pairs_once
from tfm_kernels import dropout, ops
from tfm_kernels.bench.ops import layer_norm as bench_layer_norm
from tfm_kernels.bench.shapes import Norm
from tfm_kernels.bench.subject import BACKWARD, FORWARD, Eager, Group
from tfm_kernels.testing import run
from tfm_kernels.testing.contract import bits_equal

from .subject import GpuSubject, Inputs, nan_stays_in_its_row

OPS = ("layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm")
SEED = 2**40 + 20261121
# Said before any measurement: shares of the copy's rate, and seconds for each launch
SHARE = {FORWARD: 0.92, BACKWARD: 0.85}
LAUNCH = 2.5e-6


def cases() -> Sequence[Case]:
    """Every launch first, with more rows than programs or blocks hold at once, then all pairs of the list once."""
    return [*_launches(), *(case for case in pairs_once() if case.op in OPS and case.levels["dtype"] != "f64")]


def _launches() -> list[Case]:
    found: list[Case] = []
    for position, exponent in enumerate(range(6, 17)):
        for width in (2**exponent, 2**exponent - 3):  # rows that start at multiples of 16 bytes, and rows that do not
            for dtype in ("bf16", "f32", "f16"):
                op = OPS[(position + len(found)) % len(OPS)]
                held = 264 * (2048 // 2**exponent) if exponent <= 11 else 132  # rows that an H200's programs hold
                levels = {
                    "op": op, "dtype": dtype, "data": "randn", "layout": "contiguous", "rows": (2 * held + 1,),
                    "width": width, "weight": "same", "bias": "same", "eps": None, "unbiased": False,
                    "dropout_p": 0.1 if op.startswith("add") else 0.0, "dropout_rows": False, "residual": "same",
                }  # fmt: skip
                found.append(Case(op, levels))
    return found


def masks_are_the_references(backend: str, width: int, p: float, device: str) -> None:
    """Forward and backward drop exactly the elements that the rule drops on the CPU."""
    rows = torch.cat([torch.arange(69), torch.tensor([2**33 + 7])])
    keep = dropout.keep_mask(torch.tensor(SEED), p, rows, width)
    x = torch.ones(70, width, device=device, requires_grad=True)
    residual = torch.zeros(70, width, device=device, requires_grad=True)
    options: dict[str, Any] = {"dropout_p": p, "seed": torch.tensor(SEED, device=device)}
    for op in (ops.add_layer_norm, ops.add_rms_norm):
        _, z = op(x, residual, **options, dropout_rows=rows.to(device), backend=backend)
        dx, _ = torch.autograd.grad(z.sum(), (x, residual))
        assert torch.equal((z != 0).cpu(), keep), f"forward mask at width {width}, p = {p}"
        assert torch.equal((dx != 0).cpu(), keep), f"backward mask at width {width}, p = {p}"


def branches(device: str) -> Mapping[str, tuple[str, Inputs]]:
    """Rows short, aligned or not, of 16 warps, without room for sums, walked: more than an H200's programs hold.

    With all options, and with none.
    """
    found: dict[str, tuple[str, Inputs]] = {}
    for rows, width in ((8501, 63), (8501, 64), (1101, 1024), (301, 4096), (141, 16384), (141, 65536)):
        for dtype in (torch.bfloat16, torch.float32):
            g = torch.Generator().manual_seed(width)
            new = lambda *shape, g=g, dtype=dtype: torch.randn(*shape, generator=g).to(device, dtype)  # noqa: E731
            plain = {"x": new(rows, width), "weight": new(width)}
            full: dict[str, Any] = {**plain, "residual": new(rows, width), "bias": new(width), "dropout_p": 0.3}
            full["seed"] = torch.tensor(SEED, device=device)
            label = f"{rows}x{width} {str(dtype).removeprefix('torch.')}"
            found[f"rms_norm {label}"] = ("rms_norm", plain)
            found[f"add_layer_norm {label}"] = ("add_layer_norm", full)
    return found


def beyond_int32(backend: str, width: int, device: str) -> None:
    """The last rows of a call of more than 2**31 elements are those of a call of their own, bit for bit."""
    rows, last = 2**31 // width + 9, 8
    numbers = torch.arange(rows, device=device)
    x, residual, dy = (torch.empty(rows, width, dtype=torch.float16, device=device).normal_() for _ in range(3))
    options = {"dropout_p": 0.5, "seed": torch.tensor(SEED, device=device)}
    whole = run(
        "add_rms_norm", {"x": x, "residual": residual, "dropout_rows": numbers, **options}, backend,
        douts={"y": dy, "z": None},
    )  # fmt: skip
    alone = run(
        "add_rms_norm", {"x": x[-last:], "residual": residual[-last:], "dropout_rows": numbers[-last:], **options},
        backend, douts={"y": dy[-last:], "z": None},
    )  # fmt: skip
    for name, t in alone.outputs.items():
        assert bits_equal(t, whole.outputs[name][-last:]), f"{name} of the last rows, width {width}"
    for name, dt in alone.grads.items():
        of_whole = whole.grads[name]
        assert dt is not None and of_whole is not None and bits_equal(dt, of_whole[-last:]), (
            f"d{name} of the last rows, width {width}"
        )


def _speed() -> tuple[Norm, ...]:
    def n(rows: int, features: int, **options: Any) -> Norm:
        return Norm(rows=rows, features=features, **{"dtypes": ("bfloat16",), **options})

    add, rms, add_rms = {"op": "add_layer_norm"}, {"op": "rms_norm"}, {"op": "add_rms_norm"}
    return (
        n(8192, 512),
        n(8192, 1024, headline=True, compiled=True),
        n(8192, 1024, dtypes=("float16", "float32")),
        n(16384, 4096, headline=True),
        n(65536, 128),
        n(4096, 8192),
        n(2048, 16384),
        n(1024, 65536),
        n(8192, 1024, **rms),
        n(16384, 4096, **rms),
        n(8192, 1024, **add),
        n(8192, 512, **add, dropout_p=0.1),
        n(8192, 1024, **add, dropout_p=0.1, headline=True, compiled=True),
        n(16384, 4096, **add, dropout_p=0.1, headline=True),
        n(8192, 1024, **add_rms),
    )


def _arguments(case: Norm, dtype: str, device: str = "cpu") -> dict[str, Any]:
    """With a seed, so that the kernels are timed and not torch's generator."""
    given = bench_layer_norm.arguments(case, dtype, device)
    return {**given, "seed": torch.tensor(SEED)} if case.dropout_p else given


def _eager(case: Norm, given: Mapping[str, Any]) -> Eager:
    return bench_layer_norm.eager(case, {name: value for name, value in given.items() if name != "seed"})


def predicted(group: Group, direction: str, limits: Mapping[str, Any]) -> float:
    """Traffic at the share of the copy's rate that is aimed at, and one launch forward, two backward."""
    rate = max(limits["copy"].values())
    itemsize = getattr(torch, group.dtype).itemsize
    seconds = 0.0
    for one, launches in ((FORWARD, 1), (BACKWARD, 2)):
        if direction in (one, "both"):
            moved = group.subject.bytes_moved(group.case, itemsize, one)
            seconds += launches * LAUNCH + moved / (SHARE[one] * rate)
    return seconds


def _subject(backend: str) -> GpuSubject:
    return GpuSubject(
        stem="layer_norm",
        backend=backend,
        cases=cases,
        checks={
            **{
                f"add_layer_norm masks of width {width}, p = {p}": partial(masks_are_the_references, backend, width, p)
                for width in (7, 64, 130, 8192, 16384, 65536)
                for p in (2.0**-33, 0.1, 0.5, 0.9999, 1.0)
            },
            **{
                f"{op} NaN in a row": partial(nan_stays_in_its_row, branches, op, backend)
                for op in ("rms_norm", "add_layer_norm")
            },
        },
        branches=branches,
        large={f"add_rms_norm beyond 2**31, width {w}": partial(beyond_int32, backend, w) for w in (1024, 65536)},
        speed=replace(bench_layer_norm.SUBJECT, cases=_speed(), arguments=_arguments, eager=_eager),
        predicted=predicted,
    )


TRITON, CUDA = _subject("triton"), _subject("cuda")
