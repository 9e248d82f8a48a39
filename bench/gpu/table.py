"""What a proof found, from its files: a line a part, what is red, and the table of speeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .part import GREEN, RED, UNAVAILABLE

Files = Mapping[str, Mapping[str, Any]]
SHOWN = 20  # red items in words
PEERS = ("torch", "flash", "efficient", "cudnn", "math", "torch.compile", "aten")
_SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def render(files: Files, parts: Sequence[str], stems: Sequence[str]) -> str:
    """The whole report.

    Args:
        files: part -> its file's content.
        parts: the parts that the proof has, in order.
        stems: of the ops that it is of.
    """
    blocks = [_head(files), "\n".join(_part_lines(files, parts, unfinished(files, parts, stems)))]
    blocks += ["\n".join(lines) for lines in (_red_lines(files), _speed_lines(files), _model_lines(files)) if lines]
    return "\n\n".join(blocks)


def red(files: Files) -> list[tuple[str, Mapping[str, Any]]]:
    """(part, item) of everything that is red."""
    return [(part, item) for part, file in files.items() for item in file["groups"] if item["state"] == RED]


def unfinished(files: Files, parts: Sequence[str], stems: Sequence[str]) -> list[str]:
    """The parts that have not come to their end for each of the op stems."""
    return [part for part in parts if part not in files or not set(stems) <= set(files[part].get("complete", ()))]


def _head(files: Files) -> str:
    now = next(iter(files.values()))["environment"]
    return (
        f"{now['gpu']}, driver {now['driver']}, torch {now['torch']}, triton {now['triton']}, nvcc {now['nvcc']}, "
        f"sources {now['sources']}, {now['date']}, protocol {now['protocol']}"
    )


def _part_lines(files: Files, parts: Sequence[str], late: Sequence[str]) -> Iterator[str]:
    for part in parts:
        if part not in files:
            yield f"{part:12} not run"
            continue
        states = [item["state"] for item in files[part]["groups"]]
        counts = ", ".join(f"{states.count(s)} {s}" for s in (GREEN, RED, UNAVAILABLE) if s in states) or "nothing yet"
        seconds = sum(item.get("seconds", 0.0) for item in files[part]["groups"])
        yield f"{part:12} {counts}, {seconds:.0f} s{'; NOT FINISHED' if part in late else ''}"
        whys: dict[str, list[str]] = {}
        for item in files[part]["groups"]:
            if item["state"] == UNAVAILABLE:
                whys.setdefault(item["why"], []).append(item["key"])
        for why, keys in whys.items():
            yield f"{'':12} {keys[0]}{f' and {len(keys) - 1} more' if keys[1:] else ''}: {why}"


def _red_lines(files: Files) -> list[str]:
    found = red(files)
    lines = [f"{part}: {item['key']}: {item['why'][:400]}" for part, item in found[:SHOWN]]
    return [f"RED: {len(found)}", *lines] if found else []


def _speed_lines(files: Files) -> list[str]:
    groups = [item for item in files.get("speed", {"groups": []})["groups"] if item.get("rows")]
    if not groups:
        return []
    timed = {row["implementation"] for group in groups for row in group["rows"]} | {group["chosen"] for group in groups}
    shown = [peer for peer in PEERS if peer in timed]
    lines = [
        f"{'op':16}{'shape':26}{'type':6}{'direction':10}{'ours us':>9}{'expected':>10}"
        + "".join(f"{peer:>14}" for peer in shown)
        + f"{'vs best':>9}{'of limit':>10}{'error':>8}"
    ]
    for group in groups:
        for direction in dict.fromkeys(row["direction"] for row in group["rows"]):
            lines += _speed_line(group, direction, rows_of(group, direction), files, shown)
    lines.append(
        "us: medians on the device, L2 cold, taken in turns; of limit: what a copy (or the library's matrix product) "
        "takes / ours; error: worst error / bound of the contract's cases of this op and type"
    )
    return lines


def _model_lines(files: Files) -> list[str]:
    groups = [item for item in files.get("models", {"groups": []})["groups"] if item.get("runners")]
    names = list(dict.fromkeys(runner["name"] for item in groups for runner in item["runners"]))
    if not groups:
        return []
    lines = [f"{'model':46}" + "".join(f"{name + ' ms':>26}" for name in names)]
    for item in groups:
        runners = {runner["name"]: runner for runner in item["runners"]}
        cells = (f"{r['seconds'] * 1e3:.3f} ({r['faster']:.2f}x)" if (r := runners.get(n)) else "-" for n in names)
        lines.append(f"{item['key']:46}" + "".join(f"{cell:>26}" for cell in cells))
    return [*lines, "ms: medians of a call, the host's work included; x: times faster than stock, in turns"]


def rows_of(group: Mapping[str, Any], direction: str) -> dict[str, Mapping[str, Any]]:
    """Implementation -> its row of a direction; what automatic choice took, under the name of the backend."""
    rows = {row["implementation"]: row for row in group.get("rows", ()) if row["direction"] == direction}
    if "auto" in rows:
        rows[group["chosen"]] = rows.pop("auto")
    return rows


def _speed_line(
    group: Mapping, direction: str, rows: dict[str, Mapping], files: Files, shown: Sequence[str]
) -> Iterator[str]:
    theirs = [rows[peer]["median"] for peer in PEERS if peer in rows]
    for name in [name for name in rows if name not in PEERS]:
        ours = rows[name]
        peers = [f"{rows[peer]['median'] * 1e6:.1f}" if peer in rows else "-" for peer in shown]
        best = f"{min(theirs) / ours['median']:.2f}x" if theirs else "-"
        worst = error(files, group["op"], group["dtype"])
        yield (
            f"{group['op']:16}{group['label']:26}{_SHORT[group['dtype']]:6}{direction:10}{ours['median'] * 1e6:9.1f}"
            f"{ours['predicted'] * 1e6:10.1f}"
            + "".join(f"{peer:>14}" for peer in peers)
            + f"{best:>9}{ours['limit'] / ours['median']:>10.0%}"
            + (f"{worst:8.2f}" if worst is not None else f"{'-':>8}")
        )


def error(files: Files, op: str, dtype: str) -> float | None:
    """The worst error / bound (C1) of an op's cases in a type; None where there are none."""
    items = files.get("contract", {"groups": []})["groups"]
    return max(
        (item["C1"] for item in items if item["op"] == op and item.get("dtype") == _SHORT[dtype] and "C1" in item),
        default=None,
    )
