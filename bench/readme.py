"""The generated tables: in README who can run what and how far speeds range, in bench/RESULTS.md case by case."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tfm_kernels import Mask, _backend, _library
from tfm_kernels.bench import record, report

from . import places
from .gpu import summary

# folder of results -> the processor, of which the machine itself says less
PROCESSORS = {
    "cpu-avx2": "AMD EPYC of the Zen 3 kind: AVX2, no AVX-512",
    "cpu-zen4": "AMD EPYC of the Zen 4 kind: AVX-512, AVX512_BF16",
    "cpu": "Intel Xeon: AVX-512, AVX512_FP16, AMX",
}


def rewrite() -> list[str]:
    """Brings the files up to date; the names of those that had to be changed."""
    changed = []
    for path in (places.ROOT / "README.md", places.ROOT / "bench" / "RESULTS.md"):
        before = path.read_text()
        after = render(before)
        if before != after:
            path.write_text(after)
            changed.append(path.name)
    return changed


def render(text: str) -> str:
    """A file's text with the tables between its markers, <!-- ranges:begin --> and <!-- ranges:end -->, made anew."""

    def table(found: re.Match[str]) -> str:
        return f"{found[1]}{_table(found[2])}\n{found[3]}"

    return re.sub(r"(<!-- ([a-z0-9-]+):begin -->\n).*?(<!-- \2:end -->)", table, text, flags=re.DOTALL)


def _table(name: str) -> str:
    if name == "matrix":
        return matrix()
    if name == "ranges":
        return ranges({folder: record.load(places.RESULTS / folder) for folder in PROCESSORS})
    if name == "gpu-ranges":
        return summary.ranges(record.load(places.RESULTS / "h200"))
    if name == "gpu":
        return summary.markdown(record.load(places.RESULTS / "h200"))
    return measured(name, record.load(places.RESULTS / name))


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
    calls = {what: _call(op, backend, arguments) for what, arguments in _probes(op.name).items()}
    reasons = {what: _reason(op, backend, call) for what, call in calls.items()}
    if reasons[""] is not None:
        return f"no ({_note(reasons[''], notes)})"
    marks = [_note(f"not {what}: {reason}", notes) for what, reason in reasons.items() if reason is not None]
    remark = op.remark(backend, calls[""])
    if remark is not None:
        marks.append(_note(remark, notes))
    return "yes" + (f" ({', '.join(map(str, marks))})" if marks else "")


def _call(op: _backend.Op, backend: str, arguments: Mapping[str, Any]) -> Any:
    """A call with tensors on the backend's own device; the table is about the code, not this machine."""
    call = op.describe(**arguments)
    return _on_gpu(call) if backend in ("triton", "cuda") else call


def _reason(op: _backend.Op, backend: str, call: Any) -> str | None:
    """What SUPPORT answers."""
    reason = op.support[backend](call)
    return None if backend != "cpu" and reason in _library.kernels().values() else reason


def _on_gpu(call: Any) -> Any:
    """The call as if its tensors were on a GPU; there need be none."""
    if not hasattr(call, "query"):
        return replace(call, device="cuda")
    with FakeTensorMode():  # a call of attention holds the tensors themselves
        return call._replace(query=torch.empty(call.query.shape, dtype=call.dtype, device="cuda"))


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
        probes = {"": plain, "`eps_outside`": {**plain, "eps_outside": 1e-6}}
        return probes | ({"`unbiased=True`": {**plain, "unbiased": True}} if op == "layer_norm" else {})
    if op in ("add_layer_norm", "add_rms_norm"):
        plain = {"x": x, "residual": x, "weight": w}
        probes = {"": plain, "`eps_outside`": {**plain, "eps_outside": 1e-6}, "with dropout": {**plain, **dropout}}
        return probes | ({"`unbiased=True`": {**plain, "unbiased": True}} if op == "add_layer_norm" else {})
    if op == "ffn":
        plain = {"x": x, "w1": torch.zeros(4, 8), "b1": None, "w2": torch.zeros(8, 4), "b2": None}
        gate = {**plain, "gate": torch.zeros(4, 8), "activation": "silu"}
        return {"": plain, "with a gate": gate, "with dropout": {**plain, **dropout}}
    if op == "linear":
        plain = {"x": x, "weight": torch.zeros(4, 8)}
        return {"": plain, "with gradients": {**plain, "weight": torch.zeros(4, 8, requires_grad=True)}}
    if op == "int8_ffn":
        weight, steps = torch.zeros(8, 8, dtype=torch.int8), torch.ones(8)
        plain = {"x": x, "w1": weight, "scale1": steps, "b1": None, "w2": weight, "scale2": steps, "b2": None}
        plain["dynamic"] = True
        gate = {**plain, "gate": weight, "gate_scale": steps, "activation": "silu"}
        probes = {
            "": plain,
            "with a gate": gate,
            "with gradients": {**plain, "x": torch.zeros(2, 8, requires_grad=True)},
        }
        return {**probes, "`dynamic=False`": {**plain, "dynamic": False}}
    if op == "int8_linear":
        plain = {"x": x, "weight": torch.zeros(4, 8, dtype=torch.int8), "scale": torch.ones(4)}
        return {"": plain, "with gradients": {**plain, "x": torch.zeros(2, 8, requires_grad=True)}}
    if op == "rotary":
        plain = {"x": torch.zeros(1, 2, 3, 8), "cos": torch.zeros(3, 8), "sin": torch.zeros(3, 8)}
        return {"": plain, "with gradients of cos and sin": {**plain, "cos": torch.zeros(3, 8, requires_grad=True)}}
    if op == "linear_cross_entropy":
        return {"": {"x": x, "weight": torch.zeros(4, 8), "target": torch.zeros(2, dtype=torch.int64)}}
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


def measured(folder: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """The headline cases as Markdown, each beside the fastest PyTorch path of the same run; then what is slower.

    Args:
        folder: of bench/results.
        results: what it holds.
    """
    if not results:
        return "No results are kept yet; `python -m bench` measures them on your machine."
    lines = []
    for stem, result in results.items():
        e = result["environment"]
        lines += [
            f"`{stem}` on {e['cpu']}, {e['threads']} threads, torch {e['torch']}, commit {e['commit']}, "
            f"{e['date'][:10]} (bench/results/{folder}/{stem}.json):",
            "",
            "| case | type | direction | PyTorch, us | ours, us | speed-up | of the limit |",
            "|---|---|---|---:|---:|---:|---:|",
        ]
        lines += [line for group in result["groups"] if group["headline"] for line in _measured_lines(group)]
        lines.append("")
    slower = [f"- {case}" for _, case in report.losses(results)]
    head = (
        "Of all cases, not only these, slower than PyTorch's eager functions by more than 2 %, where they take 100 us"
    )
    lines += [f"{head} or more{':' if slower else ': none.'}", "", *slower]
    return "\n".join(lines).rstrip()


def _measured_lines(group: Mapping[str, Any]) -> list[str]:
    lines = []
    for row in group["rows"]:
        if row["implementation"] != "auto" or row["direction"] == "backward":
            continue
        theirs = record.best_torch(group, row["direction"])["median"]
        direction = "forward" if row["direction"] == "forward" else "forward and backward"
        lines.append(
            f"| `{group['op']}` {group['label']} | {group['dtype']} | {direction} | {theirs * 1e6:.0f} "
            f"| {row['median'] * 1e6:.0f} | {theirs / row['median']:.2f}x | {row['limit'] / row['median']:.0%} |"
        )
    return lines


def ranges(folders: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """The least and the largest speed-up of each op and type as Markdown, a line a processor and type.

    A speed-up is the median of the fastest PyTorch path over that of automatic choice, in every group in which the
    former is noticeable.

    Args:
        folders: name in PROCESSORS -> its results by op.
    """
    stems = list(dict.fromkeys(stem for results in folders.values() for stem in results))
    names = {"layer_norm": "norms"}
    lines = [
        f"| processor | type | {' | '.join(names.get(stem, f'`{stem}`') for stem in stems)} |",
        "|---|---" + "|---:" * len(stems) + "|",
    ]
    for folder, results in folders.items():
        (threads,) = {result["environment"]["threads"] for result in results.values()}
        for dtype in dict.fromkeys(group["dtype"] for result in results.values() for group in result["groups"]):
            cells = [_range(results[stem]["groups"] if stem in results else (), dtype) for stem in stems]
            lines.append(f"| {PROCESSORS[folder]}; {threads} threads | {dtype} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _range(groups: Iterable[Mapping[str, Any]], dtype: str) -> str:
    """The range without gradients; the one with them: each where there is such a case."""
    found: dict[str, list[float]] = {"forward": [], "both": []}
    for group in groups:
        for row in group["rows"]:
            if group["dtype"] == dtype and row["implementation"] == "auto" and row["direction"] in found:
                theirs = record.best_torch(group, row["direction"])["median"]
                if theirs >= record.NOTICEABLE:
                    found[row["direction"]].append(theirs / row["median"])
    return "; ".join(summary.ends(values) for values in found.values() if values) or "-"
