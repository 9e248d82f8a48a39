"""What the results say: tables, the cases where automatic choice loses, and those where it took PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from . import record

TOLERATED = 1.02  # automatic choice may be slower than PyTorch by noise, no more

Results = Mapping[str, Mapping[str, Any]]


def rows(results: Results) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """(group, row) of every measurement."""
    for result in results.values():
        for group in result["groups"]:
            for row in group["rows"]:
                yield group, row


def losses(results: Results, *, noticeable: bool = True) -> list[tuple[float, str]]:
    """(slowdown, case) where automatic choice takes more than PyTorch's eager call, worst first.

    The slowdown is the lesser of two: the median of the paired ratios, and the ratio of the medians; on a busy machine
    one of them alone may be chance. ``noticeable`` chooses the cases in which PyTorch takes 100 us or more; the others
    are calls whose fixed cost decides. In training the choice falls once for forward and backward, so both together
    are what counts; the tables show the backward alone as well.
    """
    found = []
    for group, row in rows(results):
        if row["implementation"] != "auto" or row["direction"] == "backward":
            continue
        theirs = next(
            r["median"] for r in group["rows"] if (r["direction"], r["implementation"]) == (row["direction"], "torch")
        )
        slowdown = min(row["ratio"], row["median"] / theirs)
        if slowdown > TOLERATED and (theirs >= record.NOTICEABLE) == noticeable:
            found.append((slowdown, f"{_name(group, row)}: {_us(row['median'])} against {_us(theirs)} us"))
    return sorted(found, reverse=True)


def given_away(results: Results) -> list[str]:
    """The cases that automatic choice left to PyTorch."""
    return [group["key"] for result in results.values() for group in result["groups"] if group["chosen"] == "aten"]


def refusals(results: Results) -> list[str]:
    """What was not timed because it is wrong."""
    return [
        f"{group['key']}: {name}: {why}"
        for result in results.values()
        for group in result["groups"]
        for name, why in group["refused"].items()
    ]


def render(results: Results) -> str:
    """All of it: a table for each op, then the summary."""
    return "\n\n".join([*map(table, results.values()), summary(results)])


def table(result: Mapping[str, Any]) -> str:
    """One op's measurements, a line a direction and implementation."""
    lines = [_environment_line(result), _limits_line(result), ""]
    for group in result["groups"]:
        chosen = f"automatic choice: {group['chosen']}" + "".join(
            f"; {name} unavailable ({why})" for name, why in group["unavailable"].items()
        )
        lines.append(f"{group['key']}   [{chosen}]")
        lines.append(
            f"  {'direction':10}{'who':15}{'us':>10}{'p20':>10}{'p80':>10}{'rate':>16}{'of limit':>10}"
            f"{'vs PyTorch':>12}{'MiB':>9}"
        )
        for row in group["rows"]:
            against = record.best_torch(group, row["direction"])["median"] / row["median"]
            memory = group["memory"].get(row["implementation"])
            lines.append(
                f"  {row['direction']:10}{row['implementation']:15}{_us(row['median']):>10}{_us(row['p20']):>10}"
                f"{_us(row['p80']):>10}{rate(row):>16}{row['limit'] / row['median']:>10.0%}{against:>11.2f}x"
                + (f"{memory / 2**20:>9.1f}" if memory is not None and row["direction"] != "backward" else "")
            )
        lines += [f"  refused: {name}: {why}" for name, why in group["refused"].items()]
    return "\n".join(lines)


def rate(row: Mapping[str, Any]) -> str:
    """GFLOP/s where the matrix rate is the limit, else GB/s."""
    amount, unit = (row["flops"], "GFLOP/s") if row["bound"] == "matrix" else (row["bytes"], "GB/s")
    return f"{amount / row['median'] / 1e9:.1f} {unit}"


def summary(results: Results) -> str:
    """The lists that decide whether a change may land."""
    return "\n".join(
        [
            _listed("Refused, because the numbers are wrong", refusals(results)),
            _listed(
                f"Automatic choice slower than PyTorch by more than {TOLERATED - 1:.0%}, where PyTorch takes 100 us or "
                "more",
                [f"{ratio:.2f}x  {case}" for ratio, case in losses(results)],
            ),
            _listed(
                "The same below 100 us, where the fixed cost of a call decides",
                [f"{ratio:.2f}x  {case}" for ratio, case in losses(results, noticeable=False)],
            ),
            _listed("Automatic choice took aten", given_away(results)),
        ]
    )


def _listed(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"{title}: {len(lines) or 'none'}", *(f"  {line}" for line in lines)])


def _environment_line(result: Mapping[str, Any]) -> str:
    e = result["environment"]
    return (
        f"{e['cpu']}, {e['threads']} of {e['cores']} cores, {e['cpu_capability']}, torch {e['torch']}, "
        f"compiler {e['compiler']}, commit {e['commit']}{' with changes' if e['dirty'] else ''}, {e['date']}, "
        f"protocol {e['protocol']}"
    )


def _limits_line(result: Mapping[str, Any]) -> str:
    copy = ", ".join(f"{value / 1e9:.0f} GB/s at {int(size) >> 10} KiB" for size, value in _limits(result, "copy"))
    matrix = ", ".join(f"{name} {value / 1e9:.0f} GFLOP/s" for name, value in _limits(result, "matrix"))
    return f"limits measured beside: copy {copy}; matrix {matrix}"


def _limits(result: Mapping[str, Any], which: str) -> list[tuple[str, float]]:
    return list(result["limits"].get(which, {}).items())


def _name(group: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    return f"{group['op']} {group['label']} {group['dtype']} {row['direction']} [{group['chosen']}]"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}" if seconds < 1e-3 else f"{seconds * 1e6:.0f}"
