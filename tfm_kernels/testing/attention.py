"""The attention judge: float64 truth, bounds and the written-out eager formula of attention and attention_varlen.

    S = scale q k^T + bias,  P = softmax(S) over visible keys,  P~ = P keep / (1 - p),  O = P~ v,  lse = log sum exp S
    dv = P~^T dO,  dS = P (dO v^T keep / (1 - p) - rowsum(dO O) + dlse),  dbias = dS
    dq = scale dS k,  dk = scale dS^T q

A row that sees no key has O = 0, lse = -inf and gradients of 0; keys and values that nobody sees count as 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import dropout
from .attention_problem import Problem, Rows, packed, problem_of, scale_of, segments_of
from .rounding import Expected, product_bound, reach, rounding


def expect(op: str, inputs: Mapping[str, Any], outputs: Mapping[str, Tensor], douts: Mapping[str, Tensor | None]):
    """Name -> Expected for every output, and for every gradient where ``douts`` holds output gradients."""
    if op == "attention":
        found = _judge(problem_of(inputs), douts)
        if "dbias" in found and inputs.get("bias") is None:
            found["dmask"] = found.pop("dbias")
        return found
    parts = []
    for rows, problem in segments_of(inputs):
        dout, dlse = douts.get("out"), douts.get("lse")
        part = {"out": None if dout is None else packed(dout, rows.query), "lse": None}
        if dlse is not None:
            part["lse"] = dlse[:, rows.query].unsqueeze(0)
        parts.append((rows, _judge(problem, part)))
    return _join(inputs, parts)


def eager(op: str, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """E: the formula written out in the inputs' own type; differentiable."""
    if op == "attention":
        return _eager(problem_of(inputs))
    query, value = inputs["query"], inputs["value"]
    total, heads = query.shape[:2]
    out = query.new_zeros(total, heads, value.shape[-1])
    lse = query.new_full((heads, total), -torch.inf)
    for rows, problem in segments_of(inputs):
        part = _eager(problem)
        index = torch.arange(rows.query.start, rows.query.stop, device=query.device)
        out = out.index_copy(0, index, part["out"][0].transpose(0, 1))
        lse = lse.index_copy(1, index, part["lse"][0])
    return {"out": out, "lse": lse}


def tame(op: str, inputs: Mapping[str, Any]) -> bool:
    """Whether softmax is not saturated: where one key takes all, E is exact and a comparison with it says nothing."""
    query, key = inputs["query"].double(), inputs["key"].double()
    spread = query.square().mean().sqrt() * key.square().mean().sqrt() * query.shape[-1] ** 0.5
    return not float(spread) * abs(scale_of(inputs, query.shape[-1])) > 4.0


def _judge(problem: Problem, douts: Mapping[str, Tensor | None]) -> dict[str, Expected]:
    dtype, r = problem.query.dtype, rounding(problem.query.dtype)
    heads, kv_heads = problem.query.shape[1], problem.key.shape[1]
    group = heads // max(kv_heads, 1)
    (tq, d), (tk, dv_width) = problem.query.shape[2:], problem.value.shape[2:]
    attend, bias = problem.attend, problem.bias
    scale, size = problem.scale, abs(problem.scale)
    if bias is not None:
        attend = attend & (bias != -torch.inf)
        bias = torch.where(attend, bias.double(), 0)

    q = problem.query.double()
    seen = attend.any(2).unflatten(1, (kv_heads, group)).any(2) if heads else attend.any(2)  # (B, Hk, Tk)
    k = torch.where(seen.unsqueeze(-1), problem.key.double(), 0).repeat_interleave(group, 1)
    v = torch.where(seen.unsqueeze(-1), problem.value.double(), 0).repeat_interleave(group, 1)
    reduce = lambda t: t.unflatten(1, (kv_heads, group)).sum(2) if heads else t  # noqa: E731

    s = scale * (q @ k.transpose(-1, -2))
    s = torch.where(attend, s if bias is None else s + bias, -torch.inf)
    visible = attend.any(-1, keepdim=True)
    top = s.amax(-1, keepdim=True) if tk else s.new_zeros(*s.shape[:-1], 1)
    top = torch.where(visible, top, 0)
    p = torch.where(attend, torch.exp(s - top), 0)
    total = p.sum(-1, keepdim=True)
    p = p / torch.where(visible, total, 1)
    lse = torch.where(visible, top + total.log(), -torch.inf)
    factor = torch.ones_like(p)
    if problem.keep is not None:
        factor = problem.keep.double() * dropout.keep_scale(problem.dropout_p)
    pt = p * factor
    out = pt @ v

    qa, ka, va = q.abs(), k.abs(), v.abs()
    sizes = size * (qa @ ka.transpose(-1, -2))  # scale |q||k|^T
    level = 1 + torch.where(visible, lse.abs(), 0) + (0 if bias is None else bias.abs())
    tiny = r.flushed * size * (qa.sum(-1, True) + ka.sum(-1).unsqueeze(-2))
    e = torch.where(attend, 2 * d**0.5 * r.sums * sizes + 4 * r.sums * level + tiny, 0)
    e = e + (p * e).sum(-1, keepdim=True)
    # P e while e is small; where scores are so large that e > 1, what exp makes of it. The forward's P cannot exceed 1,
    # the backward's can: it divides by the sum through lse, whose own rounding is part of e.
    e_up = torch.exp((torch.where(attend, s - lse, -torch.inf) + e).clamp(max=250.0))
    e_down = -p * torch.expm1(-e)
    e_fwd = torch.maximum(e_up.clamp(max=1.0) - p, e_down)
    # A P below the smallest normal number may be flushed to 0, and dS / P may be large.
    flushed = 2.0**-1021 if dtype == torch.float64 else 2.0**-125
    e_bwd = torch.maximum(e_up - p, e_down) + flushed
    out_a = pt @ va
    out_e = (factor * e_fwd) @ va
    shown = torch.where(attend, factor, 0.0)
    expected = {
        "out": Expected(out, product_bound(out, out_a, shown @ va, tk, dtype, dtype, pt.sum(-1, True)) + out_e, dtype)
    }
    widest = torch.where(attend, sizes, 0).amax(-1) if tk else sizes.new_zeros(sizes.shape[:-1])
    l = lse.squeeze(-1)  # noqa: E741
    # 4 units are not enough for the dot product itself where all its terms have one sign: as in e, 2 sqrt(D) are.
    l_bound = 4 * r.sums * (1 + torch.where(l == -torch.inf, 0, l.abs())) + max(4, 2 * d**0.5) * r.sums * widest
    expected["lse"] = Expected(l, l_bound, torch.float64 if dtype == torch.float64 else torch.float32)
    dout, dlse = douts.get("out"), douts.get("lse")
    if dout is None and dlse is None:
        return expected

    do = torch.zeros_like(out) if dout is None else dout.double()
    ds = (do @ v.transpose(-1, -2)) * factor - (do * out).sum(-1, keepdim=True)
    if dlse is not None:
        ds = ds + dlse.double().unsqueeze(-1)
    slope = torch.where(attend, ds, 0)  # dS / P
    ds = p * slope
    doa = do.abs()
    dp_a = factor * (doa @ va.transpose(-1, -2))
    delta_a = (doa * (out.abs() + out_a)).sum(-1, keepdim=True)
    w = reach(ds, dtype) + p * delta_a
    full = w + p * dp_a
    # delta = rowsum(dO O) carries the score error of the whole row, not only that of its own column; and the absolute
    # error of an O too small for fp16, as where dropout has left only weights near 0.
    out_e = out_e + r.tiny * (1 + shown @ va)
    we = e_bwd * (slope.abs() + delta_a + dp_a) + p * (doa * out_e).sum(-1, keepdim=True)
    if r.narrow:
        we = we + max(d, dv_width) ** 0.5 * r.sums * full
        we = we + p * factor * r.flushed * (doa.sum(-1, True) + va.sum(-1).unsqueeze(-2))
    we = torch.where(attend, we, 0)
    first = w if r.narrow else full
    shown_p = attend.double()

    dvalue = reduce(pt.transpose(-1, -2) @ do)
    a = reduce(pt.transpose(-1, -2) @ doa)
    others = reduce(pt.sum(-2).unsqueeze(-1))
    bound = product_bound(dvalue, a, reduce(shown.transpose(-1, -2) @ doa), tq * group, dtype, dtype, others)
    bound = bound + reduce((factor * e_bwd).transpose(-1, -2) @ doa)
    # The backward's P = exp(S - lse) has the rounding of a stored lse, which the eager formula knows nothing of.
    # Where one key takes nearly all, dS is a small difference of large numbers, which the eager formula gets right by
    # luck: it multiplies by a P of exactly 1.
    lost = float((p * (doa * out.abs()).sum(-1, keepdim=True)).norm() / ds.norm().clamp(min=1e-300))
    extra = r.sums * (1 + float(level.mean()) + lost) if level.numel() else 0.0
    fair = lost <= 8.0
    expected["dvalue"] = Expected(dvalue, bound, dtype, extra=extra, fair=fair)

    dq = scale * (ds @ k)
    a, ones, others = size * (first @ ka), size * (shown_p @ ka), size * first.sum(-1, True)
    bound = product_bound(dq, a, ones, max(tk, dv_width), dtype, dtype, others)
    expected["dquery"] = Expected(dq, bound + size * (we @ ka), dtype, extra=extra, fair=fair)

    dk = scale * reduce(ds.transpose(-1, -2) @ q)
    a, ones = size * reduce(first.transpose(-1, -2) @ qa), size * reduce(shown_p.transpose(-1, -2) @ qa)
    others = size * reduce(first.sum(-2).unsqueeze(-1))
    bound = product_bound(dk, a, ones, max(tq * group, dv_width), dtype, dtype, others)
    expected["dkey"] = Expected(dk, bound + size * reduce(we.transpose(-1, -2) @ qa), dtype, extra=extra, fair=fair)

    if problem.bias is not None:
        shape, stored = problem.bias.shape, problem.bias.dtype
        value, a, score_error = ds.sum_to_size(shape), first.sum_to_size(shape), we.sum_to_size(shape)
        terms = ds.numel() // max(value.numel(), 1)
        ones = shown_p.sum_to_size(shape)
        bound = product_bound(value, a, ones, max(terms, dv_width), dtype, stored) + score_error
        expected["dbias"] = Expected(value, bound, stored, extra=extra, fair=fair)
    return expected


def _eager(problem: Problem) -> dict[str, Tensor]:
    query, dtype = problem.query, problem.query.dtype
    heads, kv_heads = query.shape[1], problem.key.shape[1]
    attend = problem.attend if problem.bias is None else problem.attend & (problem.bias != -torch.inf)
    seen = attend.any(2).unflatten(1, (kv_heads, heads // kv_heads)).any(2).unsqueeze(-1)
    key = problem.key.masked_fill(~seen, 0).repeat_interleave(heads // kv_heads, 1)
    value = problem.value.masked_fill(~seen, 0).repeat_interleave(heads // kv_heads, 1)
    s = (query @ key.transpose(-1, -2)) * problem.scale
    if problem.bias is not None:
        s = s + problem.bias.masked_fill(problem.bias == -torch.inf, 0).to(dtype)
    visible = attend.any(-1, keepdim=True)
    s = s.masked_fill(~attend, -torch.inf).masked_fill(~visible, 0)
    lse = torch.logsumexp(s, -1).masked_fill(~visible.squeeze(-1), -torch.inf)
    p = torch.softmax(s, -1).masked_fill(~visible, 0)
    if problem.keep is not None:
        p = p * problem.keep.to(dtype) * dropout.keep_scale(problem.dropout_p)
    return {"out": p @ value, "lse": lse}


def _join(inputs: Mapping[str, Any], parts: list[tuple[Rows, dict[str, Expected]]]) -> dict[str, Expected]:
    """The segments' expectations laid into packed tensors; rows of no segment are 0 (lse: -inf)."""
    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    shapes = {
        "out": (*query.shape[:2], value.shape[2]),
        "lse": (query.shape[1], query.shape[0]),
        "dquery": query.shape,
        "dkey": key.shape,
        "dvalue": value.shape,
    }
    statistics = torch.float64 if query.dtype == torch.float64 else torch.float32
    joined: dict[str, Expected] = {}
    for name in parts[0][1] if parts else shapes:
        dtype = statistics if name == "lse" else query.dtype
        number = torch.full(
            shapes[name], -torch.inf if name == "lse" else 0.0, dtype=torch.float64, device=query.device
        )
        bound = torch.zeros_like(number)
        for rows, part in parts:
            for target, source in ((number, part[name].value), (bound, part[name].bound)):
                if name == "lse":
                    target[:, rows.query] = source[0]
                else:
                    target[rows.key if name in ("dkey", "dvalue") else rows.query] = source[0].transpose(0, 1)
        extra = max((part[name].extra for _, part in parts), default=0.0)
        fair = all(part[name].fair for _, part in parts)
        joined[name] = Expected(number, bound, dtype, extra=extra, fair=fair)
    return joined
