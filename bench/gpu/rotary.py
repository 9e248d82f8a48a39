"""rotary's Triton kernel on a GPU: launches, branches, more than 2**31 elements, what it should take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tests.cases import Case, pairs_once
from tfm_kernels.bench.ops import rotary as bench_rotary
from tfm_kernels.bench.shapes import Rotary
from tfm_kernels.bench.subject import BACKWARD, FORWARD, Group
from tfm_kernels.testing import run
from tfm_kernels.testing.contract import bits_equal

from .subject import GpuSubject, Inputs

# Said before any measurement: shares of the copy's rate, and seconds for each launch
SHARE = {FORWARD: 0.90, BACKWARD: 0.90}
LAUNCH = 2.5e-6


def cases() -> Sequence[Case]:
    """Every launch first, of more than one program, then all pairs of the list once."""
    ours = [case for case in pairs_once() if case.op == "rotary" and case.levels["dtype"] != "f64"]
    return [*_launches(), *ours]


def _launches() -> list[Case]:
    found: list[Case] = []
    for d in (32, 64, 128, 256, 30, 60, 100, 250):  # heads of whole runs of 8 pairs, and others
        for dtype, factors in (("bf16", "same"), ("bf16", "f32"), ("f16", "same"), ("f16", "f32"), ("f32", "same")):
            for interleaved in (False, True):
                levels = {
                    "dtype": dtype, "data": "randn", "layout": "contiguous", "places": (3, 5, 41), "d": d,
                    "turned": "half" if d in (128, 100) and factors == "same" else "all",
                    "tables": ("one", "each_row")[len(found) % 2], "factors": factors, "interleaved": interleaved,
                }  # fmt: skip
                found.append(Case("rotary", levels))
    return found


def _heads(device: str, dtype: torch.dtype, seed: int, *shape: int) -> torch.Tensor:
    """(B, H, T, D) as a projection leaves it."""
    batch, heads, length, width = shape
    g = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, heads, width, generator=g).to(device, dtype).transpose(1, 2)


def branches(device: str) -> Mapping[str, tuple[str, Inputs]]:
    """Pairs in halves and interleaved, a whole head and a part, aligned and not, in pieces; one position of many."""
    found: dict[str, tuple[str, Inputs]] = {}
    for shape, turned in (
        ((2, 3, 70, 64), 64), ((2, 3, 70, 128), 48), ((2, 3, 70, 63), 62), ((2, 2, 9, 600), 528), ((70, 3, 1, 64), 64),
    ):  # fmt: skip
        for dtype in (torch.bfloat16, torch.float32):
            g = torch.Generator().manual_seed(turned)
            angles = 7.0 * torch.randn(shape[0], shape[2], turned, generator=g)
            label = f"{'x'.join(map(str, shape))} of {turned} {str(dtype).removeprefix('torch.')}"
            for interleaved in (False, True):
                factors = torch.float32 if interleaved else dtype
                found[f"rotary {'interleaved ' * interleaved}{label}"] = "rotary", {
                    "x": _heads(device, dtype, turned, *shape), "cos": angles.cos().to(device, factors),
                    "sin": angles.sin().to(device, factors), "interleaved": interleaved,
                }  # fmt: skip
    return found


def nan_stays_in_its_pair(device: str) -> None:
    """NaN in a feature reaches its pair's other one, forward and backward, and changes no other bit."""
    for name, (op, inputs) in branches(device).items():
        width, turned = inputs["x"].shape[-1], inputs["cos"].shape[-1]
        pair = (2, 3) if inputs["interleaved"] else (2, 2 + turned // 2)
        hit = torch.zeros(inputs["x"].shape, dtype=torch.bool, device=device)
        hit[-1, 1, -1, list(pair)] = True
        bad = torch.zeros_like(hit)
        bad[-1, 1, -1, 2] = True
        if turned < width:  # what is not turned has no pair
            hit[0, 0, 0, -1] = bad[0, 0, 0, -1] = True
        first = run(op, inputs, "triton")
        dy = first.douts["y"]
        assert dy is not None
        spoilt = {**inputs, "x": inputs["x"].masked_fill(bad, torch.nan)}
        second = run(op, spoilt, "triton", douts={"y": dy.masked_fill(bad, torch.nan)})
        for what, clean, found in (
            ("y", first.outputs["y"], second.outputs["y"]), ("dx", first.grads["x"], second.grads["x"])
        ):  # fmt: skip
            assert clean is not None and found is not None
            assert torch.equal(found.isnan(), hit), f"{name}: where {what} is NaN"
            assert bits_equal(clean[~hit], found[~hit]), f"{name}: {what} beside NaN"


def beyond_int32(shape: tuple[int, int, int, int], device: str) -> None:
    """The last rows of a call of more than 2**31 elements are those of a call of their own, bit for bit."""
    _, _, length, width = shape
    last = min(length, 500)
    g = torch.Generator(device).manual_seed(5)
    x, dy = (torch.empty(shape, dtype=torch.float16, device=device).normal_(generator=g) for _ in range(2))
    assert x.numel() > 2**31
    cos, sin = (torch.empty(length, width, dtype=torch.float16, device=device).normal_(generator=g) for _ in range(2))
    whole = run("rotary", {"x": x, "cos": cos, "sin": sin}, "triton", douts={"y": dy})
    end = (slice(-1, None), slice(-2, None), slice(-last, None))
    given = {"x": x[end], "cos": cos[-last:], "sin": sin[-last:]}
    alone = run("rotary", given, "triton", douts={"y": dy[end]})
    for name, t, of_whole in (
        ("y", alone.outputs["y"], whole.outputs["y"]), ("dx", alone.grads["x"], whole.grads["x"])
    ):  # fmt: skip
        assert t is not None and of_whole is not None and bits_equal(t, of_whole[end]), f"{name} of the last rows"


def _speed() -> tuple[Rotary, ...]:
    def r(batch: int, heads: int, length: int, dim: int, **options: Any) -> Rotary:
        return Rotary(batch=batch, heads=heads, length=length, dim=dim, **{"dtypes": ("bfloat16",), **options})

    return (
        r(1, 32, 8192, 128, headline=True, compiled=True),
        r(1, 8, 8192, 128, headline=True),
        r(8, 32, 2048, 128),
        r(8, 9, 2048, 64, headline=True),
        r(8, 9, 2048, 64, dtypes=("float16", "float32")),
        r(4, 16, 2048, 256),
        r(8, 32, 2048, 80),
        r(256, 32, 1, 128, passes=("infer",)),  # decoding
        r(1, 32, 1, 128, passes=("infer",)),
    )


def predicted(group: Group, direction: str, limits: Mapping[str, Any]) -> float:
    """Traffic at the share of the copy's rate that is aimed at, and a launch."""
    rate, itemsize = max(limits["copy"].values()), getattr(torch, group.dtype).itemsize
    return sum(
        LAUNCH + group.subject.bytes_moved(group.case, itemsize, one) / (SHARE[one] * rate)
        for one in (FORWARD, BACKWARD)
        if direction in (one, "both")
    )


TRITON = GpuSubject(
    stem="rotary",
    backend="triton",
    cases=cases,
    checks={"rotary NaN in a pair": nan_stays_in_its_pair},
    branches=branches,
    large={
        f"rotary beyond 2**31, {'x'.join(map(str, shape))}": partial(beyond_int32, shape)
        for shape in ((9, 32, 2**16, 128), (2, 2, 2**25, 24), (2**22, 9, 1, 64))
    },
    speed=replace(bench_rotary.SUBJECT, cases=_speed()),
    predicted=predicted,
)
