"""Attention over tiles of keys with a running maximum; its backward from the stored lse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ... import dropout
from ..attention_problem import Problem, packed, problem_of, segments_of
from .emulation import Emulation, Results


def attention(run: Emulation, inputs: Mapping[str, Any], douts: Mapping[str, Tensor | None]) -> Results:
    """A dense call."""
    return _dense(run, problem_of(inputs), douts)


def _dense(run: Emulation, problem: Problem, douts: Mapping[str, Tensor | None]) -> Results:
    group = problem.query.shape[1] // problem.key.shape[1]
    batch, kv_heads, tk = problem.key.shape[:3]
    scale = run.step("scale", problem.scale)
    bias = run.step("bias", run.up(problem.bias))
    attend = problem.attend if bias is None else problem.attend & (bias != -torch.inf)
    seen = attend.any(2).unflatten(1, (kv_heads, group)).any(2).unsqueeze(-1)
    attend = run.step("attend", attend)
    q = run.read(problem.query)
    k = run.step("heads", torch.where(seen, run.read(problem.key), 0).repeat_interleave(group, 1))
    v = run.step("heads", torch.where(seen, run.read(problem.value), 0).repeat_interleave(group, 1))
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
    do = torch.zeros_like(acc) if dout is None else run.read(dout)
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
        "key": run.store(reduce(dk, "dk_group").sum(2) * scale, "dk"),
        "value": run.store(reduce(dv, "dv_group").sum(2), "dv"),
    }
    if dbias is not None and problem.bias is not None:
        total_bias = run.step("dbias_full", dbias).sum_to_size(problem.bias.shape)
        grads["bias"] = run.store(total_bias, "dbias", problem.bias.dtype)
    return outputs, grads


def attention_varlen(run: Emulation, inputs: Mapping[str, Any], douts: Mapping[str, Tensor | None]) -> Results:
    """A packed call, segment by segment."""
    query, value = inputs["query"], inputs["value"]
    out = query.new_zeros(*query.shape[:2], value.shape[2])
    lse = torch.full((query.shape[1], query.shape[0]), -torch.inf, dtype=run.wide)
    grads: dict[str, Tensor] = {n: torch.zeros_like(inputs[n]) for n in ("query", "key", "value")}
    dout, dlse = douts.get("out"), douts.get("lse")
    for rows, problem in segments_of(run.step("segments", inputs)):
        problem = run.step("segment", problem)
        part: dict[str, Tensor | None] = {"out": None if dout is None else packed(dout, rows.query)}
        part["lse"] = None if dlse is None else dlse[:, rows.query].unsqueeze(0)
        run.backward = False
        outputs, found = _dense(run, problem, part)
        out[rows.query] = outputs["out"][0].transpose(0, 1)
        lse[:, rows.query] = outputs["lse"][0]
        for name, grad in found.items():
            assert grad is not None
            grads[name][rows.query if name == "query" else rows.key] = grad[0].transpose(0, 1)
    return {"out": run.step("packed", out), "lse": lse}, dict(grads)
