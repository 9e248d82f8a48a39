"""int8_ffn's Triton kernels on a GPU: launches, branches, 2**31 elements, what they should take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.cases import Case
from tfm_kernels import ops
from tfm_kernels.bench.limits import matrix_rate
from tfm_kernels.bench.ops import int8_ffn as bench_int8_ffn
from tfm_kernels.bench.shapes import Int8Ffn
from tfm_kernels.bench.subject import Group
from tfm_kernels.testing.contract import bits_equal

from .subject import GpuSubject, Inputs, nan_stays_in_its_row

# Said before any measurement: shares of the limits, how many times a library's product of bfloat16 tensor cores
# multiply integers, seconds for each launch and how many there are, parts of k among them where rows are few; bytes of
# traffic for an element of the hidden activation, float32 and its integer, each written and read
SHARE = 0.65
INTEGERS = 2.0
LAUNCH = 2.5e-6
LAUNCHES, LAUNCHES_OF_FEW = 4, 6
HIDDEN = 10
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")


def cases() -> Sequence[Case]:
    """Every launch of both products, then data, layouts and rows of every kind."""
    return [*_launches(), *_others()]


def _case(dtype: str, rows: tuple[int, ...], e: int, f: int, eo: int, activation: str, **levels: Any) -> Case:
    given = {"dtype": dtype, "data": "randn", "layout": "contiguous", "rows": rows, "e": e, "f": f, "eo": eo}
    return Case("int8_ffn", {**given, "activation": activation, "gate": False, "b1": True, "b2": True, **levels})


def _launches() -> list[Case]:
    """More tiles than an H200 has multiprocessors, and fewer, of either product: each tile, whole k and parts of it."""
    sizes = (
        (4352, 96, 1040, 1040), (2304, 96, 1040, 1040), (1100, 96, 528, 528), (60, 1040, 304, 304),
        (60, 96, 8464, 2064), (9, 96, 8464, 304), (9, 1040, 304, 8464), (1100, 97, 531, 527), (60, 1041, 305, 201),
        (9, 97, 8465, 201), (9, 1041, 301, 8465),
    )  # fmt: skip
    return [
        _case(dtype, (rows,), *size, ACTIVATIONS[(number + gate) % 4], gate=gate, b1=number % 3 > 0, b2=number % 2 > 0)
        for dtype in ("bf16", "f32")
        for gate in (False, True)
        for number, (rows, *size) in enumerate(sizes)
    ]


def _others() -> list[Case]:
    found: list[Case] = []
    for number, data in enumerate(("heavy", "outlier", "constant_rows", "mean_1000", "integers", "subnormals")):
        for i, dtype in enumerate(("bf16", "f32", "f16")):
            rows = ((5,), (2, 17), (130,))[i]
            found.append(
                _case(dtype, rows, 80, 160, 72, ACTIVATIONS[(number + i) % 4], data=data, gate=i == number % 3)
            )
    for number, layout in enumerate(("transposed", "sliced", "misaligned")):
        found += [
            _case("bf16", (2, 17), 80, 160, 72, ACTIVATIONS[number], layout=layout, gate=gate) for gate in (False, True)
        ]
    found += [_case("f16", (rows,), 96, 208, 80, name, gate=name == "silu") for rows in (9, 70) for name in ACTIVATIONS]
    return [*found, *(_case("f32", rows, 33, 70, 7, "gelu") for rows in ((), (0,), (1,)))]


def _inputs(device: str, dtype: torch.dtype, rows: int, sizes: tuple[int, int, int], **options: Any) -> dict[str, Any]:
    """Arguments of a call with biases; ``sizes`` are E, F and Eo."""
    e, f, eo = sizes
    g = torch.Generator().manual_seed(rows + e)

    def weight(out: int, width: int) -> tuple[Tensor, Tensor]:
        integers = torch.randint(-127, 128, (out, width), generator=g, dtype=torch.int8)
        return integers.to(device), ((0.5 + torch.rand(out, generator=g)) / (74 * width**0.5)).to(device)

    vector = lambda *shape: torch.randn(*shape, generator=g).to(dtype).to(device)  # noqa: E731
    biases = {"b1": vector(f), "b2": vector(eo)}
    given: dict[str, Any] = {"x": vector(rows, e), **biases, "dynamic": True, **options}
    (given["w1"], given["scale1"]), (given["w2"], given["scale2"]) = weight(f, e), weight(eo, f)
    if options.get("activation") == "silu":
        given["gate"], given["gate_scale"] = weight(f, e)
    return given


def branches(device: str) -> Mapping[str, tuple[str, Inputs]]:
    """Many rows and few, whole k and parts of it, aligned and not; gated and not; biases and none."""
    found: dict[str, tuple[str, Inputs]] = {}
    for rows, *sizes in (
        (300, 96, 8304, 96),
        (70, 400, 304, 40),
        (70, 33, 131, 25),
        (9, 400, 64, 24),
        (9, 401, 65, 25),
    ):
        e, f, eo = sizes
        for dtype in (torch.bfloat16, torch.float32):
            for activation in ("gelu", "silu"):
                word = f"{activation}{' gated' * (activation == 'silu')}"
                name = f"int8_ffn {rows} {e}-{f}-{eo} {str(dtype).removeprefix('torch.')} {word}"
                found[name] = "int8_ffn", _inputs(device, dtype, rows, (e, f, eo), activation=activation)
        found[f"{name} without biases"] = "int8_ffn", {**found[name][1], "b1": None, "b2": None}
    return found


def integers_are_pytorchs(device: str) -> None:
    """ReLU rounds nothing: y has the bits of PyTorch's own operations on the CPU, whichever tiles the products take."""
    sizes = ((4352, 96, 1040, 264), (300, 96, 528, 528), (60, 1040, 304, 200), (9, 1040, 304, 200), (9, 1041, 305, 201))
    for rows, *rest in sizes:
        e, f, eo = rest
        for gated in (False, True):
            given = _inputs("cpu", torch.float32, rows, (e, f, eo), activation="silu" if gated else "relu")
            given["activation"] = "relu"
            moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}
            y = ops.int8_ffn(**moved, backend="triton").cpu()
            assert bits_equal(y, ops.int8_ffn(**given, backend="aten")), f"{rows} rows of {e}-{f}-{eo}, gated={gated}"


def zeros_give_the_bias(device: str) -> None:
    """A hidden layer of zeros has a step of 0: y is b2, bit for bit."""
    for rows, e, f, eo in ((9, 33, 70, 20), (70, 48, 80, 24), (9, 400, 80, 24)):
        given = _inputs(device, torch.bfloat16, rows, (e, f, eo), activation="relu")
        given["b1"] = torch.full_like(given["b1"], -1e6)
        y = ops.int8_ffn(**given, backend="triton")
        assert bits_equal(y, given["b2"].expand(rows, eo)), f"{rows} rows of {e}-{f}-{eo}"


def beyond_int32_rows(device: str) -> None:
    """The last rows of x, of h and of y of more than 2**31 elements are those of a call of their own, bit for bit."""
    width, last = 256, 70_000
    rows = 2**31 // width + 9
    given = _inputs(device, torch.float16, 1, (width, 272, 264), activation="gelu")
    x = torch.empty((rows, width), device=device, dtype=torch.float16).normal_()
    call = partial(ops.int8_ffn, **{**given, "backend": "triton"})
    assert bits_equal(call(x=x)[-last:], call(x=x[-last:])), "the last rows"


def beyond_int32_weights(device: str) -> None:
    """The last of a w2 of more than 2**31 elements are those of a call of their own, bit for bit."""
    width, last = 4096, 20_000
    out = 2**31 // width + 9
    given = _inputs(device, torch.float16, 9, (256, width, 1), activation="gelu")
    w2 = torch.randint(-128, 128, (out, width), device=device, dtype=torch.int8)
    scale2, b2 = (torch.full((out,), 0.01, device=device, dtype=dtype) for dtype in (torch.float32, torch.float16))
    call = partial(ops.int8_ffn, **{**given, "backend": "triton"})
    whole, alone = call(w2=w2, scale2=scale2, b2=b2), call(w2=w2[-last:], scale2=scale2[-last:], b2=b2[-last:])
    assert bits_equal(whole[:, -last:], alone), "the last features"


def _speed() -> tuple[Int8Ffn, ...]:
    def f(rows: int, width: int, hidden: int, **options: Any) -> Int8Ffn:
        return Int8Ffn(rows=rows, width=width, hidden=hidden, **{"dtypes": ("bfloat16",), **options})

    gated: dict[str, Any] = {"activation": "silu", "gated": True}
    return (
        f(1, 4096, 11008, headline=True, **gated),
        f(16, 4096, 11008, headline=True, **gated),
        f(16, 768, 3072),
        f(64, 1024, 4096),
        f(2048, 1024, 4096, headline=True),
        f(8192, 768, 3072, dtypes=("bfloat16", "float32")),
        f(8192, 1024, 4096, activation="relu"),
        f(8192, 4096, 11008, headline=True, **gated),
    )


def _proof(case: Int8Ffn) -> Int8Ffn:
    """Rows enough for the launches of the timed case, few enough for a float64 judge."""
    return replace(case, rows=min(case.rows, 2304 if case.width > 1024 else 8192))


def predicted(group: Group, direction: str, limits: Mapping[str, Any]) -> float:
    """The products at a share of the limit, or the traffic of few rows; the hidden activation's; and the launches."""
    case, itemsize = group.case, getattr(torch, group.dtype).itemsize
    rate, copy = matrix_rate(dict(limits), "bfloat16") * INTEGERS, max(limits["copy"].values())
    products = max(
        group.subject.flops(case, direction) / rate, group.subject.bytes_moved(case, itemsize, direction) / copy
    )
    hidden = HIDDEN * case.rows * case.hidden / copy if case.rows > 64 else 0.0  # of few rows it stays in L2
    return (LAUNCHES if case.rows > 64 else LAUNCHES_OF_FEW) * LAUNCH + (products + hidden) / SHARE


TRITON = GpuSubject(
    stem="int8_ffn",
    backend="triton",
    cases=cases,
    checks={
        "int8_ffn hidden layer of zeros": zeros_give_the_bias,
        "int8_ffn integers are PyTorch's": integers_are_pytorchs,
        "int8_ffn NaN in a row": partial(nan_stays_in_its_row, branches, "int8_ffn", "triton"),
    },
    branches=branches,
    large={
        "int8_ffn beyond 2**31, rows": beyond_int32_rows,
        "int8_ffn beyond 2**31, weights": beyond_int32_weights,
    },
    speed=replace(bench_int8_ffn.SUBJECT, cases=_speed(), proof=_proof),
    predicted=predicted,
)
