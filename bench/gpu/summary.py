"""README's table of a GPU: the headline cases, Triton's kernels beside the fastest that PyTorch has for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from . import table

_DIRECTIONS = {"forward": "forward", "both": "with backward"}  # a backward alone is in the files


def markdown(files: Mapping[str, Mapping[str, Any]]) -> str:
    """The table.

    Args:
        files: part -> its file's content, as bench.gpu writes them; without "speed" there is no table.
    """
    groups = [group for group in files.get("speed", {"groups": []})["groups"] if group.get("headline")]
    lines = list(_lines(groups))
    if not lines:
        return "Nothing is measured yet: `python -m bench.gpu` does."
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


def _lines(groups: list[Mapping[str, Any]]) -> Iterator[str]:
    for group in groups:
        for direction, words in _DIRECTIONS.items():
            rows = table.rows_of(group, direction)
            theirs = {name: row["median"] for name, row in rows.items() if name in table.PEERS and name != "aten"}
            if "triton" not in rows or not theirs:
                continue
            ours, best = rows["triton"], min(theirs, key=lambda name: theirs[name])
            yield (
                f"| `{group['op']}` | {group['label']} | {group['dtype']} | {words} | {1e6 * ours['median']:.0f} | "
                f"{1e6 * theirs[best]:.0f} ({best}) | {theirs[best] / ours['median']:.2f}x | "
                f"{ours['limit'] / ours['median']:.0%} |"
            )
