"""Attention's Triton and CUDA kernels on a GPU: launches, branches, more than 2**31 elements, what they should take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.cases import Case, pairs_once
from tfm_kernels import Mask, dropout, ops
from tfm_kernels.bench.ops import attention as bench_attention
from tfm_kernels.bench.shapes import Attention
from tfm_kernels.bench.subject import BACKWARD, FORWARD, Eager, Group
from tfm_kernels.testing import assert_contract, invariance, run
from tfm_kernels.testing.contract import bits_equal

from .subject import GpuSubject, Inputs

OPS = ("attention", "attention_varlen")
# PyTorch's own kernels, one by one: what `F.scaled_dot_product_attention` chooses among
SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
SEED = 2**40 + 20261121
# Said before any measurement: shares of the library's own matrix rate by head width, and seconds for each launch
SHARE = {FORWARD: {64: 0.5, 128: 0.65}, BACKWARD: {64: 0.3, 128: 0.35}}
LAUNCH = 2.5e-6
DECODING = 0.9  # of the copy's rate, where one query reads many keys; parts of the keys take a second launch


def cases() -> Sequence[Case]:
    """Every launch first, then all pairs of the list once."""
    return [*_launches(), *(case for case in pairs_once() if case.op in OPS and case.levels["dtype"] != "f64")]


def _launches() -> list[Case]:
    found: list[Case] = []
    for d in (16, 32, 64, 96, 128, 200, 256):
        for dtype in ("bf16", "f32", "f16"):
            for queries in (50, 300):
                for bias, keep, p in (("none", "none", 0.0), ("1hqk", "b1qk", 0.1)):
                    levels = {
                        "dtype": dtype, "data": "randn", "layout": "token_major", "lengths_qk": (queries, 333),
                        "heads": (2, 4, 2), "d": d, "dv": "same", "band": "causal_br", "key_lengths": "ragged",
                        "keep": keep, "bias": bias, "bias_dtype": "same", "dropout_p": p, "scale": None,
                        "return_lse": True,
                    }  # fmt: skip
                    found.append(Case("attention", levels))
    for d in (16, 32, 64, 128, 256):  # few queries against many keys: tiles of 16 rows and of 32, in parts
        for dtype in ("bf16", "f32"):
            for heads in ((2, 4, 2), (1, 16, 1)):
                for bias, keep, p in (("none", "none", 0.0), ("1hqk", "b1qk", 0.1)):
                    levels = {
                        "dtype": dtype, "data": "randn", "layout": "token_major", "lengths_qk": (3, 2000),
                        "heads": heads, "d": d, "dv": "same", "band": "causal_br", "key_lengths": "ragged",
                        "keep": keep, "bias": bias, "bias_dtype": "same", "dropout_p": p, "scale": None,
                        "return_lse": True,
                    }  # fmt: skip
                    found.append(Case("attention", levels))
    return found


def masks_are_the_references(backend: str, keys: int, p: float, device: str) -> None:
    """Forward and backward drop exactly the weights that the rule drops on the CPU."""
    batch, heads, queries = 2, 3, 200
    keep = dropout.keep_mask(torch.tensor(SEED), p, dropout.attention_rows(batch, heads, queries, "cpu"), keys)
    q, k = torch.zeros(batch, heads, queries, 16, device=device), torch.zeros(batch, heads, keys, 16, device=device)
    options: dict[str, Any] = {"dropout_p": p, "seed": torch.tensor(SEED, device=device), "backend": backend}
    v = torch.eye(keys, device=device).expand(batch, heads, keys, keys).clone().requires_grad_()
    out = ops.attention(q, k, v, **options)
    assert torch.equal((out != 0).cpu(), keep), f"forward mask of {keys} keys, p = {p}"
    (dv,) = torch.autograd.grad(out, v, torch.eye(queries, keys, device=device).expand(batch, heads, queries, keys))
    rows = min(queries, keys)
    assert torch.equal((dv.transpose(-1, -2)[:, :, :rows] != 0).cpu(), keep[:, :, :rows]), (
        f"backward mask of {keys} keys, p = {p}"
    )


HIDING = {
    "causal": Mask.causal(),
    "window": Mask.window(2, 1),
    "lengths": Mask.lengths(torch.tensor([40, 0])),
    "keep": Mask.keep((torch.arange(170) % 3 < 2).expand(1, 1, 37, 170)),
}


def hidden_keys_are_unread(backend: str, hiding: str, dtype: torch.dtype, device: str) -> None:
    """NaN in keys that nobody sees reaches nothing: minimum and maximum drop NaN on a GPU, products do not."""
    inputs: dict[str, Any] = dict(zip(("query", "key", "value"), _drawn(dtype, device, 37, 170), strict=True))
    invariance.assert_hidden_keys_unread({**inputs, "mask": HIDING[hiding].to(device)}, backend)


def nan_arrives(backend: str, device: str) -> None:
    """A query of NaN: NaN in its row, and in the gradients of the keys that it sees, of no others."""
    q, k, v = (t.requires_grad_() for t in _drawn(torch.float32, device, 170, 170))
    with torch.no_grad():
        q[1, 3, 100] = torch.nan
    out = ops.attention(q, k, v, Mask.causal(), backend=backend)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    for name, found in (("out", out), ("dq", dq), ("dk", dk), ("dv", dv)):
        expected = torch.zeros(found.shape[:3], dtype=torch.bool, device=device)
        if name in ("out", "dq"):
            expected[1, 3, 100] = True
        else:
            expected[1, 1, :101] = True
        assert torch.equal(found.isnan().any(-1), expected), f"where {name} is NaN"


def far_rows_are_right(backend: str, device: str) -> None:
    """|lse| of 1e5 and more, where float32 has lost log(sum) beside the maximum, by large scores and by a bias."""
    q, k, v = _drawn(torch.float32, device, 37, 170)
    assert_contract("attention", {"query": 300 * q, "key": 300 * k, "value": v}, backend)
    bias = torch.zeros(1, 1, 37, 170, device=device)
    bias[:, :, 5] = torch.finfo(torch.float32).min
    (dv,) = torch.autograd.grad(ops.attention(q, k, v.requires_grad_(), bias=bias, backend=backend)[:, :, 5].sum(), v)
    torch.testing.assert_close(dv, torch.full_like(dv, 2 / 170))  # two query heads, a weight of 1/170 each


def _drawn(dtype: torch.dtype, device: str, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(keys)
    q, k, v = (torch.randn(2, heads, t, 64, generator=g) for heads, t in ((4, queries), (2, keys), (2, keys)))
    return q.to(device, dtype), k.to(device, dtype), v.to(device, dtype)


def branches(device: str) -> Mapping[str, tuple[str, Inputs]]:
    """Heads narrow, wide, not aligned; plain calls, and calls with all that there is."""
    found: dict[str, tuple[str, Inputs]] = {}
    for d in (31, 64, 128, 256):
        for dtype in (torch.bfloat16, torch.float32):
            g = torch.Generator().manual_seed(d)
            new = lambda *shape, g=g, dtype=dtype: torch.randn(*shape, generator=g).to(device, dtype)  # noqa: E731
            plain = {"query": new(2, 4, 150, d), "key": new(2, 2, 170, d), "value": new(2, 2, 170, d)}
            keep = (torch.rand(2, 1, 150, 170, generator=g) < 0.8).to(device)
            mask = Mask.causal("bottom_right") & Mask.lengths(torch.tensor([170, 33]).to(device)) & Mask.keep(keep)
            full: dict[str, Any] = {**plain, "mask": mask, "bias": new(1, 4, 150, 170), "dropout_p": 0.3}
            full["seed"] = torch.tensor(SEED, device=device)
            label = f"D{d} {str(dtype).removeprefix('torch.')}"
            found[f"attention {label}"] = ("attention", plain)
            found[f"attention with everything {label}"] = ("attention", full)
            decoding = {**plain, "query": new(2, 8, 3, d), "key": new(2, 2, 1500, d), "value": new(2, 2, 1500, d)}
            decoding["mask"] = Mask.lengths(torch.tensor([1500, 700]).to(device))
            found[f"attention of few queries {label}"] = ("attention", decoding)
    return found


def beyond_int32(backend: str, device: str) -> None:
    """The last sequence of a call of more than 2**31 elements is that of a call of its own, bit for bit."""
    batch, heads, length, d = 2**31 // (16 * 1024 * 128) + 2, 16, 1024, 128
    q, k, v, dout = (
        torch.empty(batch, heads, length, d, dtype=torch.float16, device=device).normal_() for _ in range(4)
    )
    whole = run("attention", {"query": q, "key": k, "value": v}, backend, douts={"out": dout})
    alone = run("attention", {"query": q[-1:], "key": k[-1:], "value": v[-1:]}, backend, douts={"out": dout[-1:]})
    assert bits_equal(alone.outputs["out"], whole.outputs["out"][-1:]), "out of the last sequence"
    for name, dt in alone.grads.items():
        of_whole = whole.grads[name]
        assert dt is not None and of_whole is not None and bits_equal(dt, of_whole[-1:]), f"d{name}, last sequence"


def _speed() -> tuple[Attention, ...]:
    def a(queries: int, dim: int, **options: Any) -> Attention:
        tokens, width = 16384, 2048
        given = {"batch": tokens // queries, "heads": width // dim, "dtypes": ("bfloat16",), **options}
        return Attention(queries=queries, dim=dim, **given)

    return (
        a(512, 64, headline=True),
        a(4096, 64),
        a(2048, 128, headline=True),
        a(8192, 128, causal=True, headline=True),
        a(2048, 64, causal=True),
        a(512, 64, padded=True, headline=True),
        a(1024, 64, bias=True, headline=True),
        a(1024, 64, dropout_p=0.1, headline=True),
        a(1024, 128, key_heads=4, causal=True),
        a(512, 64, packed=True, op="attention_varlen"),
        a(1024, 64, dtypes=("float32",), batch=2),
        a(1, 128, batch=8, heads=32, key_heads=8, keys=32768, passes=("infer",), headline=True),
        a(1, 128, batch=1, heads=32, key_heads=8, keys=32768, passes=("infer",)),
        a(1, 64, batch=64, heads=8, keys=512, passes=("infer",), headline=True),
    )


def _arguments(case: Attention, dtype: str, device: str = "cpu") -> dict[str, Any]:
    """With a seed, so that the kernels are timed and not torch's generator."""
    given = bench_attention.arguments(case, dtype, device)
    return {**given, "seed": torch.tensor(SEED)} if case.dropout_p else given


def _eager(case: Attention, given: Mapping[str, Any]) -> Eager:
    return bench_attention.eager(case, {name: value for name, value in given.items() if name != "seed"})


def sdpa_kernels(function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """A function that calls SDPA, held to each of its kernels; one that cannot run the call raises."""

    def held(kernel: SDPBackend) -> Callable[..., Any]:
        def attention(**tensors: torch.Tensor) -> Any:
            with sdpa_kernel(kernel):
                return function(**tensors)

        return attention

    return {name: held(kernel) for name, kernel in SDPA.items()}


def predicted(group: Group, direction: str, limits: Mapping[str, Any]) -> float:
    """Operations at the share of the matrix rate that is aimed at, or bytes at the copy's where they take longer."""
    matrix = limits["matrix"]
    rate, copy = matrix.get(group.dtype, max(matrix.values())), max(limits["copy"].values())
    itemsize = getattr(torch, group.dtype).itemsize
    seconds = 0.0
    for one, launches in ((FORWARD, 1), (BACKWARD, 3)):
        if direction in (one, "both"):
            share = SHARE[one][64 if group.case.dim <= 64 else 128]
            work = group.subject.flops(group.case, one) / (share * rate)
            launches, rate_of_bytes = (2, DECODING * copy) if group.case.queries == 1 else (launches, copy)
            moved = group.subject.bytes_moved(group.case, itemsize, one)
            seconds += launches * LAUNCH + max(work, moved / rate_of_bytes)
    return seconds


def _subject(backend: str) -> GpuSubject:
    return GpuSubject(
        stem="attention",
        backend=backend,
        cases=cases,
        checks={
            **{
                f"attention masks of {keys} keys, p = {p}": partial(masks_are_the_references, backend, keys, p)
                for keys in (7, 64, 200)
                for p in (2.0**-33, 0.1, 0.5, 0.9999, 1.0)
            },
            **{
                f"attention hidden keys, {hiding}, {dtype}": partial(hidden_keys_are_unread, backend, hiding, dtype)
                for hiding in HIDING
                for dtype in (torch.float32, torch.bfloat16)
            },
            "attention NaN that is seen": partial(nan_arrives, backend),
            "attention far rows": partial(far_rows_are_right, backend),
        },
        branches=branches,
        large={"attention beyond 2**31": partial(beyond_int32, backend)},
        speed=replace(bench_attention.SUBJECT, cases=_speed(), arguments=_arguments, eager=_eager, rivals=sdpa_kernels),
        predicted=predicted,
    )


TRITON, CUDA = _subject("triton"), _subject("cuda")
