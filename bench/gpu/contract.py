"""The numeric contract on the GPU: every case on the named backend, forward and backward, in poisoned memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from tests.cases import Case, report_case
from tfm_kernels.bench.record import Results

from .part import Item, Room


def items(room: Room, results: Results) -> Iterator[Item]:
    for subject in room.built():
        for case in subject.cases():
            yield subject.item(case.id, partial(_judge, case, subject.backend, room.device), case.op)
        for name, check in subject.checks.items():
            yield subject.item(name, partial(_check, check, room.device), name.split()[0])


def _judge(case: Case, backend: str, device: str) -> dict[str, Any]:
    with poisoned():
        report = report_case(case, backend, device).raise_broken()
    ratios = {rule: [f.ratio for f in report.findings if f.rule == rule] for rule in ("C1", "C2", "C3")}
    return {"dtype": case.levels["dtype"], **{rule: round(max(found), 4) for rule, found in ratios.items() if found}}


def _check(check: Any, device: str) -> dict[str, Any]:
    with poisoned():
        check(device)
    return {}


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside, torch.empty is NaN, or the largest integer: an element that a kernel forgets to write shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        with warnings.catch_warnings():  # the judge's own operators are not all deterministic on a GPU
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]
