"""Clean emulations of the kernels' algorithms in plain float32 tensors: what an honest kernel's rounding looks like.

The contract must pass every one of them on every data class, or its bounds are wrong. Each step of interest goes
through ``Emulation.step``, where tfm_kernels/testing/defects.py plants its errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import dropout
from . import attention as truth
from . import ffn as ffn_truth
from . import norm as norm_truth

Hook = Callable[[Any, "Emulation"], Any]
Results = tuple[dict[str, Tensor], dict[str, Tensor | None]]


class Emulation:
    """One run of an algorithm.

    Attributes:
        dtype: the storage type.
        tile: how many keys (hidden columns, rows) are taken at a time.
        lazy: attention's accumulator is rescaled only where the maximum has grown by more than 8 powers of two; ffn
            keeps its hidden activation in float32.
        index: the number of the tile at work, and ``last`` that of the last one.
        backward: whether the backward is at work.
        context: intermediate values by name, for planted defects to build theirs from.
    """

    def __init__(self, dtype: torch.dtype, tile: int = 64, lazy: bool = False, hooks: Mapping[str, Hook] | None = None):
        self.dtype, self.tile, self.lazy, self.hooks = dtype, tile, lazy, hooks or {}
        self.wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.index = self.last = 0
        self.backward = False
        self.context: dict[str, Any] = {}

    def step(self, name: str, value: Any) -> Any:
        """``value``, or what a planted defect makes of it."""
        return self.hooks[name](value, self) if name in self.hooks else value

    def low(self, t: Tensor) -> Tensor:
        """An operand rounded to the storage type between two products."""
        return (self.hooks["low"](t, self) if "low" in self.hooks else t.to(self.dtype)).to(self.wide)

    def store(self, t: Tensor, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A result rounded once, at the store."""
        t = self.step(name, t)
        return self.hooks["store"](t, self) if "store" in self.hooks else t.to(dtype or self.dtype)

    def up(self, t: Tensor | None) -> Tensor | None:
        """A stored tensor widened to the type of the sums."""
        return None if t is None else t.to(self.wide)

    def tiles(self, length: int) -> Iterator[slice]:
        """The tiles of an axis, counted in ``index``."""
        slices = [slice(start, min(start + self.tile, length)) for start in range(0, length, self.tile)]
        self.last = len(slices) - 1
        for index, tile in enumerate(self.step("tiles", slices)):
            self.index = index
            yield tile


def emulate(
    op: str,
    inputs: Mapping[str, Any],
    douts: Mapping[str, Tensor | None],
    *,
    tile: int = 64,
    lazy: bool = False,
    hooks: Mapping[str, Hook] | None = None,
) -> Results:
    """Runs an op's algorithm, forward and backward.

    Args:
        op: the public function's name.
        inputs: its arguments by name.
        douts: output name -> output gradient.
        tile: keys, hidden columns or rows at a time.
        lazy: see Emulation.
        hooks: step name -> function(value, emulation) that a planted defect puts in its place.

    Returns:
        (outputs, grads) as judge() takes them.
    """
    run = Emulation(next(iter(inputs.values())).dtype, tile, lazy, hooks)
    with torch.no_grad():
        if op == "attention":
            return _attention(run, truth._problem(inputs), douts)
        if op == "attention_varlen":
            return _attention_varlen(run, inputs, douts)
        return _ffn(run, inputs, douts) if op == "ffn" else _norm(run, op, inputs, douts)


def _attention(run: Emulation, problem: truth.Problem, douts: Mapping[str, Tensor | None]) -> Results:
    group = problem.query.shape[1] // problem.key.shape[1]
    batch, kv_heads, tk = problem.key.shape[:3]
    scale = run.step("scale", problem.scale)
    bias = run.step("bias", run.up(problem.bias))
    attend = problem.attend if bias is None else problem.attend & (bias != -torch.inf)
    seen = attend.any(2).unflatten(1, (kv_heads, group)).any(2).unsqueeze(-1)
    attend = run.step("attend", attend)
    q = problem.query.to(run.wide)
    k = run.step("heads", torch.where(seen, problem.key.to(run.wide), 0).repeat_interleave(group, 1))
    v = run.step("heads", torch.where(seen, problem.value.to(run.wide), 0).repeat_interleave(group, 1))
    keep, grow = problem.keep, run.step("grow", dropout.keep_scale(problem.dropout_p))

    def scores(sl: slice) -> Tensor:
        s = run.step("product", q @ k[:, :, sl].transpose(-1, -2)) * scale
        s = s if bias is None else s + bias.expand(*s.shape[:-1], tk)[..., sl]
        return torch.where(attend[..., sl], run.step("scores", s), -torch.inf)

    m = q.new_full((*q.shape[:3], 1), -torch.inf)
    total, acc = torch.zeros_like(m), q.new_zeros(*q.shape[:3], v.shape[-1])
    for sl in run.tiles(tk):
        s = scores(sl)
        top = torch.maximum(m, s.amax(-1, keepdim=True))
        if run.lazy:
            top = torch.where((top - m > 5.5) | (m == -torch.inf), top, m)  # 8 powers of two
        safe = torch.where(top == -torch.inf, 0, top)
        alpha = torch.exp(m - safe)
        p = run.step("p", torch.exp(s - safe))
        kept = p if keep is None else torch.where(keep[..., sl], p, 0)
        run.context["kept"] = kept
        total = run.step("total", total * run.step("alpha_total", alpha) + run.step("row_sum", p.sum(-1, keepdim=True)))
        acc = run.step("acc", acc * run.step("alpha", alpha) + run.low(kept) @ v[:, :, sl])
        m = run.step("top", top)
    visible = total > 0
    out = run.step("empty", torch.where(visible, acc / torch.where(visible, total, 1), 0))
    out = out if keep is None else out * grow
    lse = run.step("lse", torch.where(visible, m + torch.log(total), -torch.inf).squeeze(-1))
    out = run.store(out, "out")
    outputs = {"out": out, "lse": lse}
    dout, dlse = douts.get("out"), run.step("dlse", douts.get("lse"))
    if dout is None and dlse is None:
        return outputs, {}

    run.backward = True
    do = torch.zeros_like(acc) if dout is None else dout.to(run.wide)
    delta = run.step("delta", (do * out.to(run.wide)).sum(-1, keepdim=True))
    if dlse is not None:
        delta = delta - dlse.unsqueeze(-1)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dbias = q.new_zeros(*q.shape[:3], tk) if bias is not None else None
    level = torch.where(lse == -torch.inf, 0, lse).unsqueeze(-1)
    for sl in run.tiles(tk):
        p = torch.exp(scores(sl) - level)
        dp = do @ v[:, :, sl].transpose(-1, -2)
        pd = p
        if keep is not None:
            kept = run.step("keep_bwd", keep)[..., sl]
            pd, dp = torch.where(kept, p * grow, 0), torch.where(kept, dp * grow, 0)
        dv[:, :, sl] = run.low(pd).transpose(-1, -2) @ do
        ds = run.step("ds", p * (dp - delta))
        if dbias is not None:
            dbias[..., sl] = ds
        ds = run.low(ds)
        dq = run.step("dq_acc", dq + ds @ k[:, :, sl])
        dk[:, :, sl] = ds.transpose(-1, -2) @ q
    reduce = lambda t, name: run.step(name, t.unflatten(1, (kv_heads, group)))  # noqa: E731
    grads: dict[str, Tensor | None] = {
        "query": run.store(dq * scale, "dq"),
        "key": run.store(_group_sum(reduce(dk, "dk_group")) * scale, "dk"),
        "value": run.store(_group_sum(reduce(dv, "dv_group")), "dv"),
    }
    if dbias is not None and problem.bias is not None:
        total_bias = run.step("dbias_full", dbias).sum_to_size(problem.bias.shape)
        grads["bias"] = run.store(total_bias, "dbias", problem.bias.dtype)
    return outputs, grads


def _group_sum(t: Tensor) -> Tensor:
    return t.sum(2)


def _attention_varlen(run: Emulation, inputs: Mapping[str, Any], douts: Mapping[str, Tensor | None]) -> Results:
    query, value = inputs["query"], inputs["value"]
    out = query.new_zeros(*query.shape[:2], value.shape[2])
    lse = torch.full((query.shape[1], query.shape[0]), -torch.inf, dtype=run.wide)
    grads: dict[str, Tensor] = {n: torch.zeros_like(inputs[n]) for n in ("query", "key", "value")}
    dout, dlse = douts.get("out"), douts.get("lse")
    for rows, problem in truth._segments(run.step("segments", inputs)):
        part: dict[str, Tensor | None] = {"out": None if dout is None else truth._packed(dout, rows.query)}
        part["lse"] = None if dlse is None else dlse[:, rows.query].unsqueeze(0)
        run.backward = False
        outputs, found = _attention(run, problem, part)
        out[rows.query] = outputs["out"][0].transpose(0, 1)
        lse[:, rows.query] = outputs["lse"][0]
        for name, grad in found.items():
            assert grad is not None
            grads[name][rows.query if name == "query" else rows.key] = grad[0].transpose(0, 1)
    return {"out": out, "lse": lse}, dict(grads)


def _norm(run: Emulation, op: str, inputs: Mapping[str, Any], douts: Mapping[str, Tensor | None]) -> Results:
    x, weight, bias = inputs["x"], inputs.get("weight"), inputs.get("bias")
    width, centred = x.shape[-1], op.endswith("layer_norm")
    keep = norm_truth._keep(inputs)
    grow = run.step("grow", dropout.keep_scale(inputs.get("dropout_p", 0.0)))
    drop = lambda t, mask: t if mask is None else torch.where(mask, t * grow, 0)  # noqa: E731
    outputs, z = {}, x
    storage = norm_truth._storage(inputs)
    run.dtype = storage
    if "residual" in inputs:
        exact = inputs["residual"].to(run.wide) + drop(x.to(run.wide), keep)
        run.context["exact"] = exact
        z = outputs["z"] = run.store(exact, "z", storage)
    wide = run.context["z"] = run.step("z_read", z.to(run.wide))
    mean = run.context["mean"] = run.step(
        "mean", wide.mean(-1, keepdim=True) if centred else torch.zeros_like(wide[..., :1])
    )
    degrees = run.step("degrees", width - 1 if inputs.get("unbiased", False) else width)
    variance = run.context["variance"] = run.step("variance", (wide - mean).square().sum(-1, keepdim=True) / degrees)
    eps = run.context["eps"] = norm_truth._eps(op, inputs)
    rstd = run.step("rstd", (variance + eps).rsqrt())
    xhat = run.step("xhat", (wide - mean) * rstd)
    y = xhat if weight is None else xhat * weight.to(run.wide)
    y = y if bias is None else y + bias.to(run.wide)
    outputs = {"y": run.store(y, "y", storage), **outputs}

    dy, dz = douts.get("y"), run.step("dz", douts.get("z"))
    run.backward = True
    g32 = torch.zeros_like(wide) if dy is None else dy.to(run.wide)
    g = g32 if weight is None else g32 * weight.to(run.wide)
    xhat = run.step("xhat_bwd", (wide - mean) * rstd)
    first = g.mean(-1, keepdim=True) if centred else torch.zeros_like(g[..., :1])
    second = (g * xhat).sum(-1, keepdim=True) / run.step("degrees_bwd", degrees)
    total = rstd * (g - run.step("mean_g", first) - xhat * run.step("mean_gx", second))
    total = total if dz is None else total + dz.to(run.wide)
    grads: dict[str, Tensor | None] = {}
    if "residual" in inputs:
        grads["residual"] = run.store(total, "dresidual", inputs["residual"].dtype)
        total = drop(total, run.step("keep_bwd", keep))
    grads["x"] = run.store(total, "dx", x.dtype)
    for name, parameter, terms in (("weight", weight, g32 * xhat), ("bias", bias, g32)):
        if parameter is not None:
            flat = terms.reshape(-1, width)
            acc = flat.new_zeros(width)
            for sl in run.tiles(flat.shape[0]):
                acc = run.step(f"d{name}_acc", acc + run.step(f"d{name}_part", flat[sl].sum(0)))
            grads[name] = run.store(acc, f"d{name}", parameter.dtype)
    return outputs, grads


def _ffn(run: Emulation, inputs: Mapping[str, Any], douts: Mapping[str, Tensor | None]) -> Results:
    x, w1, w2 = (inputs[name].to(run.wide) for name in ("x", "w1", "w2"))
    b1, b2, gate = (run.step(name, run.up(inputs.get(name))) for name in ("b1", "b2", "gate"))
    leading = x.shape[:-1]
    x = x.reshape(leading.numel(), x.shape[-1])
    name = run.step("activation", inputs.get("activation", "relu"))
    factor = ffn_truth._factor(inputs, x.shape[0], w1.shape[0], x.device).to(run.wide)
    factor = run.step("factor", factor)
    a = run.step("a", x @ w1.T if b1 is None else x @ w1.T + b1)
    c = torch.ones_like(a) if gate is None else x @ gate.T
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
    dy = dy.to(run.wide).reshape(x.shape[0], w2.shape[0])
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
    for key, terms in (("b1", da), ("b2", dy)):
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
