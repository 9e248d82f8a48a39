"""The cases that every backend is judged on: all pairs of what can vary in a call, several times over.

A case is an id and the levels of its factors; inputs are built when asked for, from a seed of its own. The list is the
same on every machine. ``run_case`` runs a case, ``report_case`` judges it.
"""

import functools
import itertools
import random
import zlib
from collections import Counter
from dataclasses import dataclass, field

import torch

from tests import case_inputs, case_levels
from tfm_kernels.testing import contract_report, run
from tfm_kernels.testing.data import lay_out

COUNTS = {
    "norm": 440, "attention": 680, "attention_varlen": 160, "ffn": 300, "linear_cross_entropy": 180, "rotary": 120,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        op: the public function's name.
        levels: factor -> level, the words that the id is made of.
    """

    op: str
    levels: dict = field(hash=False)

    @property
    def id(self):
        """Every level, in words: what to pass to ``pytest -k``."""
        return "-".join(
            [self.op, *(case_levels.word(name, level) for name, level in self.levels.items() if name != "op")]
        )

    @property
    def dtype(self):
        """The storage type."""
        return case_inputs.DTYPES[self.levels["dtype"]]

    def inputs(self, device="cpu"):
        """The public function's arguments."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.id.encode()))
        return case_inputs.BUILD[self.op](self.op, self.levels, generator, device)

    def douts(self, outputs):
        """Output gradients in the case's layout; small where ordinary ones would overflow fp16."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.id.encode()) + 1)
        factor = 2.0**-16 if self.levels["data"] == "extremes" else 1.0
        draw = lambda t: (torch.randn(t.shape, generator=generator) * factor).to(t.dtype).to(t.device)
        return {name: lay_out(draw(t), self.levels["layout"]) for name, t in outputs.items()}


def run_case(case, backend, device="cpu"):
    """Runs a case forward and backward on one backend; judges nothing."""
    return run(case.op, case.inputs(device), backend, douts=case.douts)


def report_case(case, backend, device="cpu"):
    """What the contract says of a case on one backend."""
    return contract_report(case.op, case.inputs(device), backend, douts=case.douts)


def all_pairs(factors, count, seed):
    """``count`` combinations of levels in which every pair of levels occurs, again and again.

    Greedy: of some random combinations, each step takes the one with the most pairs that are still to come; when all
    pairs have come, the next round starts.
    """
    rng = random.Random(seed)
    names = list(factors)
    every = {
        (a, i, b, j): None  # a dict, because a set's order is no promise
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(factors[names[a]]))
        for j in range(len(factors[names[b]]))
    }
    open_pairs, rows = dict(every), []
    while len(rows) < count:
        best, best_pairs = None, []
        start = next(iter(open_pairs))
        for _ in range(12):
            row = [rng.randrange(len(factors[name])) for name in names]
            row[start[0]], row[start[2]] = start[1], start[3]  # every step covers at least one open pair
            pairs = [(a, row[a], b, row[b]) for a, b in itertools.combinations(range(len(names)), 2)]
            pairs = [pair for pair in pairs if pair in open_pairs]
            if len(pairs) > len(best_pairs):
                best, best_pairs = row, pairs
        rows.append({name: factors[name][i] for name, i in zip(names, best, strict=True)})
        for pair in best_pairs:
            del open_pairs[pair]
        if not open_pairs:
            open_pairs = dict(every)
    return rows


def once(rows):
    """Those of ``rows`` that have every pair of levels that all of them have, and none that others make needless."""
    pairs = [{(a, repr(row[a]), b, repr(row[b])) for a, b in itertools.combinations(row, 2)} for row in rows]
    count = Counter(pair for found in pairs for pair in found)
    kept = []
    for row, found in zip(reversed(rows), reversed(pairs), strict=True):
        if all(count[pair] > 1 for pair in found):
            count.subtract(found)
        else:
            kept.append(row)
    return kept[::-1]


def _cases(rows):
    cases = {}
    for family, found in rows.items():
        for levels in found:
            case = Case(levels.get("op", family), levels)
            cases.setdefault(case.id, case)
    for op, levels in case_levels.EXTRA:
        case = Case(op, levels)
        cases.setdefault(case.id, case)
    return list(cases.values())


_ROWS = {
    family: all_pairs(case_levels.FACTORS[family], count, seed) for seed, (family, count) in enumerate(COUNTS.items())
}
CASES = _cases(_ROWS)


@functools.cache
def pairs_once():
    """Of these as few as have every pair of levels, float64 left out: for the few minutes that there are on a GPU."""
    return _cases({family: once([row for row in rows if row["dtype"] != "f64"]) for family, rows in _ROWS.items()})
