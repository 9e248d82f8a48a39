"""The feed-forward block with its hidden activation rounded once, or kept in float32 (lazy)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ffn import factor_of, halves
from .emulation import Emulation, Results


def ffn(run: Emulation, inputs: Mapping[str, Any], douts: Mapping[str, Tensor | None]) -> Results:
    """A call, forward and backward."""
    x, w1, w2 = (run.read(inputs[name]) for name in ("x", "w1", "w2"))
    b1, b2 = (run.step(name, run.up(inputs.get(name))) for name in ("b1", "b2"))
    b1, b_gate = halves(b1, w1.shape[0])
    b_gate = run.step("b_gate", b_gate)
    gate = run.step("gate", None if inputs.get("gate") is None else run.read(inputs["gate"]))
    leading = x.shape[:-1]
    x = x.reshape(leading.numel(), x.shape[-1])
    name = run.step("activation", inputs.get("activation", "relu"))
    factor = factor_of(inputs, x.shape[0], w1.shape[0], x.device).to(run.wide)
    factor = run.step("factor", factor)
    a = run.step("a", x @ w1.T if b1 is None else x @ w1.T + b1)
    c = torch.ones_like(a) if gate is None else x @ gate.T if b_gate is None else x @ gate.T + b_gate
    run.context |= {"a": a, "c": c, "factor": factor, "activation": name}
    h = run.step("h", activation(name, a) * c * factor)
    h = h if run.lazy else run.low(h)
    y = torch.zeros(x.shape[0], w2.shape[0], dtype=run.wide)
    for sl in run.tiles(w1.shape[0]):
        y = run.step("acc", y + run.step("y_part", h[:, sl] @ w2[:, sl].T))
    y = run.store(y if b2 is None else y + b2, "y").view(*leading, w2.shape[0])
    dy = douts.get("y")
    if dy is None:
        return {"y": y}, {}

    run.backward = True
    dy = run.read(dy).reshape(x.shape[0], w2.shape[0])
    if not run.lazy:  # the saved preact is rounded; the lazy emulation computes it again
        a, c = run.low(a), run.low(c)
        h = run.low(activation(name, a) * c * factor)
    factor = run.step("factor_bwd", factor)
    dh = run.step("dh", dy @ w2 * factor)
    a = run.step("a_bwd", a)
    da = run.low(run.step("da", dh * _slope(run.step("activation_bwd", name), a) * c))
    dc = run.low(dh * run.step("dc_activation", activation(name, a)))
    dx = da @ w1 if gate is None else da @ w1 + run.step("dx_gate", dc @ gate)
    grads = {
        "x": run.store(dx, "dx").view(inputs["x"].shape),
        "w1": run.store(run.step("dw1", da.T @ x), "dw1_out"),
        "w2": run.store(dy.T @ run.step("h_bwd", h), "dw2"),
    }
    if gate is not None:
        grads["gate"] = run.store(dc.T @ x, "dgate")
    biased = inputs.get("b1") is not None and inputs["b1"].shape[0] != w1.shape[0]
    for key, terms in (("b1", torch.cat((da, run.step("db_gate", dc)), 1) if biased else da), ("b2", dy)):
        if inputs.get(key) is not None:
            acc = terms.new_zeros(terms.shape[1])
            for sl in run.tiles(terms.shape[0]):
                acc = run.step(f"d{key}_acc", acc + run.step(f"d{key}_part", terms[sl].sum(0)))
            grads[key] = run.store(acc, f"d{key}")
    return {"y": y}, dict(grads)


def activation(name: str, a: Tensor) -> Tensor:
    """act(a) by name."""
    return F.gelu(a, approximate="tanh") if name == "gelu_tanh" else getattr(F, name)(a)


def _slope(name: str, a: Tensor) -> Tensor:
    """act'(a) in the type of the sums, by PyTorch's own backward."""
    with torch.enable_grad():
        leaf = a.detach().requires_grad_()
        return torch.autograd.grad(activation(name, leaf).sum(), leaf)[0]
