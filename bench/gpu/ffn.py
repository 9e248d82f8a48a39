"""ffn's Triton and CUDA kernels on a GPU: launches, branches, more than 2**31 elements, what they should take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tests.cases import Case, pairs_once
from tfm_kernels import dropout, ops
from tfm_kernels.bench.limits import matrix_rate
from tfm_kernels.bench.ops import ffn as bench_ffn
from tfm_kernels.bench.shapes import Ffn
from tfm_kernels.bench.subject import BACKWARD, FORWARD, Eager, Group
from tfm_kernels.testing import run
from tfm_kernels.testing.contract import Results, bits_equal

from .subject import GpuSubject, Inputs, nan_stays_in_its_row

ACTIVATIONS = ("gelu", "silu", "relu", "gelu_tanh")
SEED = 2**40 + 20261121
# Said before any measurement: shares of the matrix rate of the library's own products, and seconds for each launch
SHARE = {FORWARD: 0.70, BACKWARD: 0.65}
LAUNCH = 2.5e-6
LAUNCHES = {FORWARD: 2, BACKWARD: 8}


def cases() -> Sequence[Case]:
    """Every launch of pick_config first, then all pairs of the list once."""
    return [*_launches(), *(case for case in pairs_once() if case.op == "ffn" and case.levels["dtype"] != "f64")]


def _launches() -> list[Case]:
    """More tiles than an H200 has programs, and fewer: large tiles, small ones, those of odd sizes, and cut sums.

    The backward has a launch of its own where there is neither gate nor dropout.
    """
    sizes = ((4100, 512, 2112), (2100, 2056, 2112), (1100, 264, 1032), (200, 64, 520), (1300, 63, 257), (70, 16, 24))
    found: list[Case] = []
    for dtype in ("bf16", "f32", "f16"):
        for number, (rows, width, hidden) in enumerate(sizes):
            for gate in (False, "biased" if number % 2 else True):
                levels = {
                    "dtype": dtype, "data": "randn", "layout": "contiguous", "rows": (rows,), "e": width, "f": hidden,
                    "eo": "same", "activation": ACTIVATIONS[number % 4], "gate": gate,
                    "b1": True, "b2": True, "dropout_p": 0.1 if gate or number else 0.0, "dropout_rows": False,
                    "recompute": bool(gate),
                }  # fmt: skip
                found.append(Case("ffn", levels))
    return found


def masks_are_the_references(backend: str, hidden: int, p: float, device: str) -> None:
    """Forward and backward drop exactly the elements that the rule drops on the CPU."""
    rows = torch.cat([torch.arange(299), torch.tensor([2**33 + 7])])
    keep = dropout.keep_mask(torch.tensor(SEED), p, rows, hidden)
    x = torch.ones(300, hidden, device=device, requires_grad=True)
    eye = torch.eye(hidden, device=device)
    options: dict[str, Any] = {"dropout_p": p, "seed": torch.tensor(SEED, device=device)}
    y = ops.ffn(x, eye, None, eye, None, **options, dropout_rows=rows.to(device), backend=backend)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal((y != 0).cpu(), keep), f"forward mask of {hidden} features, p = {p}"
    assert torch.equal((dx != 0).cpu(), keep), f"backward mask of {hidden} features, p = {p}"


def branches(device: str) -> Mapping[str, tuple[str, Inputs]]:
    """Large tiles, small ones, rows that are not aligned; all options and none."""
    found: dict[str, tuple[str, Inputs]] = {}
    for rows, width, hidden in ((2200, 256, 2056), (70, 72, 136), (70, 63, 131)):
        for dtype in (torch.bfloat16, torch.float32):
            g = torch.Generator().manual_seed(width)

            def new(*shape: int, scale: float = 1.0, g: Any = g, dtype: torch.dtype = dtype) -> torch.Tensor:
                return (scale * torch.randn(*shape, generator=g)).to(device, dtype)

            plain = {"x": new(rows, width), "w1": new(hidden, width, scale=width**-0.5), "b1": None}
            plain |= {"w2": new(width, hidden, scale=hidden**-0.5), "b2": None}
            full: dict[str, Any] = {**plain, "b1": new(hidden), "b2": new(width), "activation": "gelu"}
            full |= {"gate": new(hidden, width, scale=width**-0.5), "dropout_p": 0.3}
            full["seed"] = torch.tensor(SEED, device=device)
            label = f"{rows} {width}-{hidden} {str(dtype).removeprefix('torch.')}"
            found[f"ffn relu {label}"] = ("ffn", plain)
            found[f"ffn gelu gated dropout {label}"] = ("ffn", full)
    return found


def beyond_int32(backend: str, hidden: int, device: str) -> None:
    """The last rows of a hidden activation of more than 2**31 elements are those of a call of their own, bit for bit.

    That call has rows enough for the same launches, so that both form their sums in one order.
    """
    rows, last, width = 2**31 // hidden + 9, 17000, 256
    numbers = torch.arange(rows, device=device)
    x, dy = (torch.empty(rows, width, dtype=torch.float16, device=device).normal_() for _ in range(2))
    weights = [torch.empty(shape, dtype=torch.float16, device=device) for shape in ((hidden, width), (width, hidden))]
    w1, w2 = (w.normal_().mul_(w.shape[1] ** -0.5) for w in weights)
    options = {"w1": w1, "b1": None, "w2": w2, "b2": None, "activation": "gelu", "dropout_p": 0.5}
    options["seed"] = torch.tensor(SEED, device=device)

    def outcome(keep: slice) -> Results:
        inputs = {"x": x[keep], "dropout_rows": numbers[keep], **options}
        return run("ffn", inputs, backend, douts={"y": dy[keep]})

    whole, alone = outcome(slice(None)), outcome(slice(-last, None))
    pairs = {"y": (alone.outputs["y"], whole.outputs["y"]), "dx": (alone.grads["x"], whole.grads["x"])}
    for name, (t, of_whole) in pairs.items():
        assert t is not None and of_whole is not None and bits_equal(t, of_whole[-last:]), (
            f"{name} of the last rows, {hidden} features"
        )


def _speed() -> tuple[Ffn, ...]:
    def f(rows: int, width: int, **options: Any) -> Ffn:
        return Ffn(rows=rows, width=width, hidden=4 * width, **{"dtypes": ("bfloat16",), **options})

    return (
        f(8192, 512),
        f(8192, 1024, headline=True, compiled=True),
        f(8192, 1024, dtypes=("float16", "float32")),
        f(8192, 2048, headline=True),
        f(8192, 4096),
        f(512, 1024),
        f(8192, 1024, activation="relu"),
        f(8192, 1024, dropout_p=0.1, headline=True, compiled=True),
        f(8192, 1024, activation="silu", gated=True, headline=True, compiled=True),
        f(8192, 1024, activation="silu", gated=True, dropout_p=0.1),
    )


def _arguments(case: Ffn, dtype: str, device: str = "cpu") -> dict[str, Any]:
    """With a seed, so that the kernels are timed and not torch's generator."""
    given = bench_ffn.arguments(case, dtype, device)
    return {**given, "seed": torch.tensor(SEED)} if case.dropout_p else given


def _eager(case: Ffn, given: Mapping[str, Any]) -> Eager:
    return bench_ffn.eager(case, {name: value for name, value in given.items() if name != "seed"})


def _proof(case: Ffn) -> Ffn:
    """Rows enough for the launches of the timed case, few enough for a float64 judge."""
    return replace(case, rows=min(case.rows, 4224 if case.width > 512 else 7424))


def predicted(group: Group, direction: str, limits: Mapping[str, Any]) -> float:
    """The products at the share of the matrix rate that is aimed at, beside the launches."""
    rate = matrix_rate(dict(limits), group.dtype)
    seconds = 0.0
    for one in (FORWARD, BACKWARD):
        if direction in (one, "both"):
            seconds += LAUNCHES[one] * LAUNCH + group.subject.flops(group.case, one) / (SHARE[one] * rate)
    return seconds


def _subject(backend: str) -> GpuSubject:
    return GpuSubject(
        stem="ffn",
        backend=backend,
        cases=cases,
        checks={
            **{
                f"ffn masks of {hidden} features, p = {p}": partial(masks_are_the_references, backend, hidden, p)
                for hidden in (7, 64, 130, 2048)
                for p in (2.0**-33, 0.1, 0.5, 0.9999, 1.0)
            },
            "ffn NaN in a row": partial(nan_stays_in_its_row, branches, "ffn", backend),
        },
        branches=branches,
        large={
            f"ffn beyond 2**31, {hidden} features": partial(beyond_int32, backend, hidden) for hidden in (4096, 65536)
        },
        speed=replace(bench_ffn.SUBJECT, cases=_speed(), arguments=_arguments, eager=_eager, proof=_proof),
        predicted=predicted,
    )


TRITON, CUDA = _subject("triton"), _subject("cuda")
