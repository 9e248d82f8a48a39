"""README's two generated tables: who can run what, and what was measured."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tfm_kernels import Mask, _backend, _library

from . import record

README = record.ROOT / "README.md"
_COMPILED = ("cpu", "triton", "cuda")


def rewrite() -> bool:
    """Brings README.md up to date; whether it had to be changed."""
    before = README.read_text()
    after = render(before)
    README.write_text(after)
    return before != after


def render(text: str) -> str:
    """README's text with both tables made anew between their markers."""
    text = _between(text, "matrix", matrix())
    return _between(text, "measured", measured(record.load(record.RESULTS / "cpu")))


def _between(text: str, name: str, content: str) -> str:
    pattern = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"README.md must hold the markers <!-- {name}:begin --> and <!-- {name}:end -->")
    return pattern.sub(lambda found: f"{found[1]}{content}\n{found[2]}", text)


def matrix() -> str:
    """op x backend as Markdown, from what SUPPORT answers to a few calls of each op."""
    notes: list[str] = []
    lines = [f"| op | {' | '.join(_backend.BACKENDS)} |", "|---" * (len(_backend.BACKENDS) + 1) + "|"]
    for name, op in sorted(_backend.OPS.items()):
        cells = [_cell(op, backend, notes) for backend in _backend.BACKENDS]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]).rstrip()


def _cell(op: _backend.Op, backend: str, notes: list[str]) -> str:
    if backend not in op.support:
        return "-"
    reasons = {what: _reason(op, backend, arguments) for what, arguments in _probes(op.name).items()}
    if reasons[""] is not None:
        return f"no ({_note(reasons[''], notes)})"
    marks = [_note(f"not {what}: {reason}", notes) for what, reason in reasons.items() if reason is not None]
    if backend in op.remarks:
        marks.append(_note(op.remarks[backend], notes))
    return "yes" + (f" ({', '.join(map(str, marks))})" if marks else "")


def _reason(op: _backend.Op, backend: str, arguments: Mapping[str, Any]) -> str | None:
    """What SUPPORT answers to tensors on the backend's own device; the table is about the code, not this machine."""
    call = op.describe(**arguments)
    if backend in ("triton", "cuda"):
        call = _on_gpu(call)
    reason = op.support[backend](call)
    return None if backend != "cpu" and reason in _library.kernels().values() else reason


def _on_gpu(call: Any) -> Any:
    """The call as if its tensors were on a GPU; there need be none."""
    if hasattr(call, "device"):
        return replace(call, device="cuda")
    with FakeTensorMode():
        return call._replace(query=torch.empty(call.query.shape, dtype=call.query.dtype, device="cuda"))


def _note(note: str, notes: list[str]) -> int:
    """The number of a footnote, a new one where none says the same."""
    if note not in notes:
        notes.append(note)
    return notes.index(note) + 1


def _probes(op: str) -> dict[str, dict[str, Any]]:
    """Features of an op -> arguments of a small call that uses them; the plain call has no name."""
    x, w = torch.zeros(2, 8), torch.zeros(8)
    seed = torch.zeros((), dtype=torch.int64)
    dropout = {"dropout_p": 0.5, "seed": seed}
    if op in ("layer_norm", "rms_norm"):
        plain: dict[str, Any] = {"x": x, "weight": w}
        return {"": plain} | ({"`unbiased=True`": {**plain, "unbiased": True}} if op == "layer_norm" else {})
    if op in ("add_layer_norm", "add_rms_norm"):
        plain = {"x": x, "residual": x, "weight": w}
        probes = {"": plain, "with dropout": {**plain, **dropout}}
        return probes | ({"`unbiased=True`": {**plain, "unbiased": True}} if op == "add_layer_norm" else {})
    if op == "ffn":
        plain = {"x": x, "w1": torch.zeros(4, 8), "b1": None, "w2": torch.zeros(8, 4), "b2": None}
        gate = {**plain, "gate": torch.zeros(4, 8), "activation": "silu"}
        return {"": plain, "with a gate": gate, "with dropout": {**plain, **dropout}}
    if op == "linear":
        plain = {"x": x, "weight": torch.zeros(4, 8)}
        return {"": plain, "with gradients": {**plain, "weight": torch.zeros(4, 8, requires_grad=True)}}
    if op == "attention_varlen":
        q, ends = torch.zeros(3, 2, 8), torch.tensor([0, 1, 3])
        longest = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 2, "max_seqlen_k": 2}
        plain = {"query": q, "key": q, "value": q, **longest}
    else:
        q = torch.zeros(1, 2, 3, 8)
        plain = {"query": q, "key": q, "value": q}
    if op == "scaled_dot_product_attention":
        return {"": plain, "with a mask": {**plain, "attn_mask": torch.ones(3, 3, dtype=torch.bool)}, "with dropout": {
            **plain, "dropout_p": 0.5}}  # fmt: skip
    probes = {
        "": plain,
        "with a mask": {**plain, "mask": Mask.causal()},
        "with dropout": {**plain, **dropout},
        "`return_lse=True`": {**plain, "return_lse": True},
    }
    return probes | ({"with a bias": {**plain, "bias": torch.zeros(3, 3)}} if op == "attention" else {})


def measured(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The headline cases as Markdown, each beside the fastest PyTorch path of the same run."""
    if not results:
        return "No results are kept yet; `python -m bench` measures them on your machine."
    lines = []
    for stem, result in results.items():
        e = result["environment"]
        lines += [
            f"`{stem}` on {e['cpu']}, {e['threads']} threads, torch {e['torch']}, commit {e['commit']}, "
            f"{e['date'][:10]} (bench/results/{e['device']}/{stem}.json):",
            "",
            "| case | type | direction | PyTorch, us | ours, us | speed-up | of the limit |",
            "|---|---|---|---:|---:|---:|---:|",
        ]
        lines += [line for group in result["groups"] if group["headline"] for line in _measured_lines(group)]
        lines.append("")
    lines.append(
        "PyTorch: the faster of eager and, where it was tried, `torch.compile`. Ours: automatic choice. Medians of "
        "runs taken in turns; limit: the slower of a copy of the same bytes and the library's own matrix product."
    )
    return "\n".join(lines)


def _measured_lines(group: Mapping[str, Any]) -> list[str]:
    lines = []
    for row in group["rows"]:
        if row["implementation"] != "auto" or row["direction"] == "backward":
            continue
        theirs = min(
            other["median"]
            for other in group["rows"]
            if other["direction"] == row["direction"] and other["implementation"].startswith("torch")
        )
        direction = "forward" if row["direction"] == "forward" else "forward and backward"
        lines.append(
            f"| `{group['op']}` {group['label']} | {group['dtype']} | {direction} | {theirs * 1e6:.0f} "
            f"| {row['median'] * 1e6:.0f} | {theirs / row['median']:.2f}x | {row['limit'] / row['median']:.0%} |"
        )
    return lines
