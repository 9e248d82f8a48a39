"""C4 and C5 with tolerance 0: data on which a right kernel has no rounding to hide behind.

The mask probe has queries of 0 and values that are unit vectors, so that attention's output is its weight matrix: which
keys each query saw, and of how many, is read off. The same probe reads dropout's mask, and the gradient of the values
reads the mask that the backward used. Small sparse integers go through products without any rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import dropout
from ..mask import Mask
from .contract import bits_equal, run
from .judge import TRUTHS
from .report import ContractError


def assert_mask_support(
    backend: str,
    mask: Mask,
    shape: tuple[int, int, int, int],
    *,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    dropout_p: float = 0.0,
    seed: int = 0,
) -> None:
    """Reads off who attends to whom, forward and backward, and compares with Mask.dense and the dropout rule.

    Args:
        backend: the backend to name.
        mask: any Mask that fits ``shape``.
        shape: (B, H, Tq, Tk), below 65536 / (2 Tk) keys for exact counts in 16 bits.
        bias: what hides by -inf, or None; other values must be 0.
        dtype: the storage type.
        device: where to run.
        dropout_p: probability to drop; kept weights are then 1 / (count (1 - dropout_p)).
        seed: dropout's seed.

    Raises:
        ContractError: a pair is seen that must not be, or not seen that must be, or a weight is not 1 / count.
    """
    batch, heads, tq, tk = shape
    number = torch.tensor(seed, dtype=torch.int64, device=device)
    attend = mask.dense(batch, heads, tq, tk, device)
    if bias is not None:
        attend = attend & (bias != -torch.inf)
    kept = attend
    if dropout_p > 0.0:
        rows = dropout.attention_rows(batch, heads, tq, device)
        kept = attend & dropout.keep_mask(number, dropout_p, rows, tk)
    query = torch.zeros(batch, heads, tq, 1, dtype=dtype, device=device)
    key = torch.ones(batch, heads, tk, 1, dtype=dtype, device=device)
    inputs: dict[str, Any] = {"query": query, "key": key, "mask": mask.to(device), "bias": bias, "dropout_p": dropout_p}
    if dropout_p > 0.0:
        inputs["seed"] = number

    value = torch.eye(tk, dtype=dtype, device=device).expand(batch, heads, tk, tk)
    seen = run("attention", {**inputs, "value": value}, backend, backward=False).outputs["out"]
    _compare(backend, "out", seen, attend, kept, mask, dropout_p)

    value = torch.zeros(batch, heads, tk, tq, dtype=dtype, device=device)
    dout = torch.eye(tq, dtype=dtype, device=device).expand(batch, heads, tq, tq).contiguous()
    grads = run("attention", {**inputs, "value": value}, backend, douts={"out": dout}).grads
    dvalue = grads["value"]
    assert dvalue is not None
    _compare(backend, "dvalue", dvalue.transpose(-1, -2), attend, kept, mask, dropout_p)


def _compare(
    backend: str, name: str, weights: Tensor, attend: Tensor, kept: Tensor, mask: Mask, dropout_p: float
) -> None:
    wrong = (weights != 0) != kept
    if bool(wrong.any()):
        pair = wrong.nonzero()[0].tolist()
        said = "is seen" if not bool(kept[tuple(pair)]) else "is not seen"
        raise ContractError(
            f"attention: backend {backend!r}: {name}: pair {pair} {said}; {int(wrong.sum())} of {wrong.numel()} pairs "
            f"are wrong for the mask: {mask.explain()}, dropout_p={dropout_p}"
        )
    count = attend.sum(-1, keepdim=True).expand(attend.shape)
    grown = weights.double() * (1.0 if dropout_p == 0.0 else 1 - dropout_p)
    off = kept & ((grown * count - 1).abs() > 2.0**-7)
    if bool(off.any()):
        where = tuple(off.nonzero()[0].tolist())
        raise ContractError(
            f"attention: backend {backend!r}: {name}: the weight of pair {list(where)} is {weights[where].item()}, "
            f"expected 1/{int(count[where])} for the mask: {mask.explain()}, dropout_p={dropout_p}"
        )


def integers(op: str, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> dict[str, Any]:
    """Inputs of an op, small integers and mostly 0, whose outputs (and, for ffn, gradients) have no rounding error.

    Args:
        op: "ffn", or "attention" with 64 visible keys of equal score.
        dtype: the storage type; every intermediate number fits in bfloat16's 8 bits.
        device: where to put them.
        seed: of the values.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, density: float = 0.1) -> Tensor:
        values = torch.randint(-1, 2, shape, generator=generator)
        return (values * (torch.rand(shape, generator=generator) < density)).to(dtype).to(device)

    if op == "ffn":
        options = {"w1": draw(70, 33), "b1": draw(70), "w2": draw(29, 70), "b2": draw(29)}
        return {"x": draw(37, 33), **options, "activation": "relu"}
    # Queries live in the first half of the head dimension and keys in the second, so all scores are 0, yet dq and dk
    # are not; with 64 keys every weight is 2^-6.
    query, key = draw(2, 4, 40, 16, density=0.5), draw(2, 2, 64, 16, density=0.5)
    query[..., 8:] = 0
    key[..., :8] = 0
    return {"query": query, "key": key, "value": draw(2, 2, 64, 20, density=0.5), "scale": 1.0}


def assert_exact(op: str, inputs: Mapping[str, Any], backend: str, *, backward: bool = True) -> None:
    """Demands equality with the float64 truth, tolerance 0, on data made by ``integers``.

    Args:
        op: the public function's name.
        inputs: its arguments.
        backend: the backend to name.
        backward: whether gradients (of integer output gradients) have to be exact too.
    """
    generator = torch.Generator().manual_seed(1)

    def small(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        draw = lambda t: torch.randint(-1, 2, t.shape, generator=generator).to(t.dtype).to(t.device)  # noqa: E731
        return {
            name: draw(t) * (torch.rand(t.shape, generator=generator) < 0.1).to(t.device) for name, t in outputs.items()
        }

    results = run(op, inputs, backend, douts=small, backward=backward)
    with torch.no_grad():
        expected = TRUTHS[op].expect(op, inputs, results.outputs, results.douts)
    given = {**results.outputs, **{f"d{name}": t for name, t in results.grads.items() if t is not None}}
    for name, got in given.items():
        wrong = got.double() != expected[name].value
        if bool(wrong.any()):
            where = tuple(wrong.nonzero()[0].tolist())
            raise ContractError(
                f"{op}: backend {backend!r}: {name} must be exact on small integers, got {got[where].item()} at "
                f"{list(where)}, expected {expected[name].value[where].item()}; {int(wrong.sum())} of {wrong.numel()} "
                "differ"
            )


def assert_same_bits(first: Mapping[str, Tensor | None], second: Mapping[str, Tensor | None], what: str) -> None:
    """Demands equality of two sets of results bit for bit; ``what`` says between which calls."""
    for name, t in first.items():
        other = second[name]
        if t is None or other is None:
            if t is not other:
                raise ContractError(f"{name}: {what}: one of the two is missing")
            continue
        if not bits_equal(t, other):
            different = (t != other) & ~(t.isnan() & other.isnan())
            where = tuple(different.nonzero()[0].tolist()) if bool(different.any()) else ()
            raise ContractError(
                f"{name}: {what}: {int(different.sum())} of {t.numel()} elements differ, first at {list(where)}: "
                f"{t[where].tolist() if where else t.shape} and {other[where].tolist() if where else other.shape}"
            )
