"""C4's invariances: changes of a call that may not change a bit of its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..mask import Mask
from .contract import Results, draw_douts, run
from .data import LAYOUTS, lay_out
from .exact import assert_same_bits
from .report import ContractError


def assert_view_equals_contiguous(op: str, inputs: Mapping[str, Any], backend: str, *, backward: bool = True) -> None:
    """Every layout of the same values has to give the bits of the contiguous call, forward and backward.

    Args:
        op: the public function's name.
        inputs: its arguments.
        backend: the backend to name.
        backward: False compares the forward alone.
    """
    for layout in LAYOUTS:
        if layout != "contiguous":
            views = {name: lay_out(t, layout) if _floating(t) else t for name, t in inputs.items()}
            plain = {name: t.contiguous() if _floating(t) else t for name, t in views.items()}
            first = run(op, views, backend, douts=_drawn(layout), backward=backward)
            douts = _each(first.douts, lambda t: t.contiguous())
            second = run(op, plain, backend, douts=douts, backward=backward)
            _same(first, second, f"{op}: backend {backend!r}: layout {layout} against contiguous")


def assert_hidden_keys_unread(inputs: Mapping[str, Any], backend: str) -> None:
    """What lies in keys and values that no query of their heads sees may not change a bit: 0 against NaN, inf and 1e4.

    Args:
        inputs: arguments of attention, with a mask or a bias that hides.
        backend: the backend to name.
    """
    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    (batch, heads, tq), (kv_heads, tk) = query.shape[:3], key.shape[1:3]
    seen = (inputs.get("mask") or Mask()).dense(batch, heads, tq, tk, key.device)
    if inputs.get("bias") is not None:
        seen = seen & (inputs["bias"] != -torch.inf)
    hidden = ~seen.expand(batch, heads, tq, tk).any(2).unflatten(1, (kv_heads, heads // kv_heads)).any(2).unsqueeze(-1)
    if not bool(hidden.any()):
        raise ValueError("every key is seen by some query of its heads: nothing is hidden whose reading could show")
    fill = lambda number: {  # noqa: E731
        **inputs,
        "key": key.masked_fill(hidden, number),
        "value": value.masked_fill(hidden, number),
    }
    first = run("attention", fill(0.0), backend)
    for number in (torch.nan, torch.inf, -torch.inf, 1e4):
        second = run("attention", fill(number), backend)
        _same(first, second, f"attention: backend {backend!r}: padding of {number} against 0")


def assert_padding_unread(inputs: Mapping[str, Any], key_lengths: Tensor, backend: str) -> None:
    """The same of a padded batch.

    Args:
        inputs: arguments of attention, without a mask.
        key_lengths: (B,) how many keys of each sequence are real.
        backend: the backend to name.
    """
    assert_hidden_keys_unread({**inputs, "mask": Mask.lengths(key_lengths)}, backend)


def assert_nan_stays_in_its_row(op: str, inputs: Mapping[str, Any], backend: str) -> None:
    """NaN in a row of x makes that row of y NaN, and changes no bit of the other rows of the outputs and of dx.

    Args:
        op: "ffn", one of the norms, "int8_linear", "int8_ffn", or "linear_cross_entropy" without a reduction.
        inputs: its arguments, x of at least two rows (M, N).
        backend: the backend to name.
    """
    x = inputs["x"]
    number = x.shape[0] // 2
    bad = torch.zeros(x.shape[0], dtype=torch.bool, device=x.device)
    bad[number] = True
    first = run(op, inputs, backend)
    second = run(op, {**inputs, "x": x.masked_fill(bad.unsqueeze(1), torch.nan)}, backend, douts=first.douts)
    what = f"{op}: backend {backend!r}: NaN in row {number} of x"
    y = next(iter(second.outputs.values()))
    if not bool(y[bad].isnan().all()):
        raise ContractError(f"{what}: that row of y must be NaN, got {y[bad].flatten()[:4].tolist()}, ...")
    others = lambda results: {  # noqa: E731
        name: None if t is None else t[~bad] for name, t in {**results.outputs, "dx": results.grads.get("x")}.items()
    }
    assert_same_bits(others(first), others(second), what)


def assert_batch_and_heads_independent(inputs: Mapping[str, Any], backend: str) -> None:
    """Permuting batch and key heads (with their groups of query heads) permutes the results, bit for bit.

    Args:
        inputs: arguments of attention: query, key, value and plain options, no mask, no dropout.
        backend: the backend to name.
    """
    batch, heads = inputs["query"].shape[:2]
    kv_heads = inputs["key"].shape[1]
    generator = torch.Generator().manual_seed(2)
    order_b, order_h = torch.randperm(batch, generator=generator), torch.randperm(kv_heads, generator=generator)

    def permuted(t: Tensor) -> Tensor:
        grouped = t.unflatten(1, (kv_heads, t.shape[1] // kv_heads))
        return grouped[order_b][:, order_h].flatten(1, 2)

    first = run("attention", inputs, backend)
    moved = {name: permuted(t) if name in ("query", "key", "value") else t for name, t in inputs.items()}
    second = run("attention", moved, backend, douts=_each(first.douts, permuted))
    expected = Results(_plain(_each(first.outputs, permuted)), _each(first.grads, permuted), {})
    _same(expected, second, f"attention: backend {backend!r}: batch and heads permuted")


def assert_key_order_free(inputs: Mapping[str, Any], backend: str) -> None:
    """Permuting the keys of data made by ``exact.integers`` changes no bit of the output.

    Args:
        inputs: arguments of attention on which sums are exact in any order.
        backend: the backend to name.
    """
    order = torch.randperm(inputs["key"].shape[2], generator=torch.Generator().manual_seed(3))
    moved = {**inputs, "key": inputs["key"][:, :, order], "value": inputs["value"][:, :, order]}
    first = run("attention", inputs, backend, backward=False)
    second = run("attention", moved, backend, backward=False)
    assert_same_bits(first.outputs, second.outputs, f"attention: backend {backend!r}: keys permuted")


def _same(first: Results, second: Results, what: str) -> None:
    assert_same_bits(first.outputs, second.outputs, what)
    assert_same_bits({f"d{n}": t for n, t in first.grads.items()}, {f"d{n}": t for n, t in second.grads.items()}, what)


def _each(tensors: Mapping[str, Tensor | None], change: Any) -> dict[str, Tensor | None]:
    return {name: None if t is None else change(t) for name, t in tensors.items()}


def _plain(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: t for name, t in tensors.items() if t is not None}


def _drawn(layout: str) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor | None]]:
    return lambda outputs: _each(draw_douts(outputs), lambda t: lay_out(t, layout))


def _floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
