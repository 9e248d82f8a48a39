"""Tables of a GPU: the headline cases, Triton's kernels beside the fastest that PyTorch has for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from . import table

Rows = Mapping[str, Mapping[str, Any]]
_DIRECTIONS = {"forward": "forward", "both": "with backward"}  # a backward alone is in the files
_NOTHING = "Nothing is measured yet: `python -m bench.gpu` does."
_NORMS = ("layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm")


def markdown(files: Mapping[str, Mapping[str, Any]]) -> str:
    """The table.

    Args:
        files: part -> its file's content, as bench.gpu writes them; without "speed" there is no table.
    """
    lines = [_line(*compared) for compared in _compared(files)]
    if not lines:
        return _NOTHING
    now = files["speed"]["environment"]
    return "\n".join(
        [
            f"{now['gpu']}, torch {now['torch']}, triton {now['triton']}; microseconds on the device, medians, L2 "
            "cold, taken in turns.",
            "",
            "| op | case | type | | Triton | PyTorch | ratio | of limit |",
            "|---|---|---|---|---|---|---|---|",
            *lines,
        ]
    )


def ranges(files: Mapping[str, Mapping[str, Any]]) -> str:
    """The least and the largest ratio of the same cases, a column an op, without gradients; then with them."""
    found: dict[str, dict[str, list[float]]] = {}
    for group, direction, rows, best in _compared(files):
        of_op = found.setdefault("norms" if group["op"] in _NORMS else f"`{group['op']}`", {})
        of_op.setdefault(direction, []).append(rows[best]["median"] / rows["triton"]["median"])
    if not found:
        return _NOTHING
    cells = ["; ".join(ends(of_op[direction]) for direction in _DIRECTIONS if direction in of_op) for of_op in
             found.values()]  # fmt: skip
    gpu = files["speed"]["environment"]["gpu"]
    return "\n".join(
        [f"| {' | '.join(['GPU', *found])} |", "|---" + "|---:" * len(found) + "|", f"| {' | '.join([gpu, *cells])} |"]
    )


def ends(ratios: Sequence[float]) -> str:
    """The least and the largest, "1.05 to 12": three digits below 2, where they decide, and two above."""
    words = (f"{r:.2f}" if r < 1.995 else f"{r:.1f}" if r < 9.95 else f"{r:.0f}" for r in (min(ratios), max(ratios)))
    return " to ".join(dict.fromkeys(words))


def _compared(files: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], str, Rows, str]]:
    """(group, direction, its rows, the fastest of PyTorch's) of the headline cases that both have run."""
    for group in files.get("speed", {"groups": []})["groups"]:
        for direction in _DIRECTIONS if group.get("headline") else ():
            rows = table.rows_of(group, direction)
            theirs = {name: row["median"] for name, row in rows.items() if name in table.PEERS and name != "aten"}
            if "triton" not in rows or not theirs:
                continue
            yield group, direction, rows, min(theirs, key=lambda name: theirs[name])


def _line(group: Mapping[str, Any], direction: str, rows: Rows, best: str) -> str:
    ours, theirs = rows["triton"], rows[best]["median"]
    return (
        f"| `{group['op']}` | {group['label']} | {group['dtype']} | {_DIRECTIONS[direction]} | "
        f"{1e6 * ours['median']:.0f} | {1e6 * theirs:.0f} ({best}) | {theirs / ours['median']:.2f}x | "
        f"{ours['limit'] / ours['median']:.0%} |"
    )
