"""Whether a compiled Triton kernel is what was planned, under the Triton of the committed tables or under another."""

from collections.abc import Callable, Collection, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import triton

from tests.aot import table


class Spill(AssertionError):
    """A kernel keeps on a stack what was to stay in registers: which kernels do changes with Triton's releases."""


def keeps_to_registers(name, found, stack=0, in_loops=0):
    """Raises Spill where a kernel has more bytes of stack than planned, or loops that multiply touch it more often.

    With bytes planned, ``found`` has to tell about its loops: figures() was given what multiplies.
    """
    looped = found["stack in loops"] if stack and found["stack"] else 0
    touched = not stack and {"LDL", "STL"} & set(found)
    if found["stack"] > stack or found["local"] or looped > in_loops or touched:
        raise Spill(f"{name} spills: {found}")


@contextmanager
def held(name, found, file):
    """Around the assertions on the figures of a kernel; then, under the Triton of a table, they must be the table's.

    Under another Triton a Spill becomes an expected failure that names both releases. Any other assertion is as hard
    there: results that repeat, matrix units, shared memory, registers of as many programs as were planned.

    Args:
        name: the kernel's entry.
        found: its figures.
        file: the committed table.
    """
    committed = table.load(file)
    ours = committed["triton"] == triton.__version__
    try:
        yield
    except Spill as spill:
        if ours:
            raise
        pytest.xfail(f"planned with triton {committed['triton']}, and this is {triton.__version__}: {spill}")
    assert not ours or found == committed["kernels"][name], f"write {file.name} anew, by the command in its table's .py"


def tests_of(
    entries: Mapping[str, Any],
    measure: Callable[[Any], Mapping[str, Any]],
    file: Path,
    fits: Callable[[str, Any, Any], None],
    quick: Collection[str],
    count: range,
) -> tuple[Callable, Callable]:
    """The two tests that every committed table has: each entry compiled anew, and all of the table as it is.

    Args:
        entries: name -> what is compiled.
        measure: measure(entry) -> its figures.
        file: the committed table.
        fits: fits(name, entry, figures) raises where they are not as planned.
        quick: the entries that `make test` compiles.
        count: how many these may be.
    """

    @pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in quick else pytest.mark.slow) for n in entries])
    def test_compiles_as_planned(name):
        found = measure(entries[name])
        assert "products one by one" not in found, f"{name} waits for each of its products: {found}"
        with held(name, found, file):
            fits(name, entries[name], found)

    def test_the_table_is_complete_and_as_planned():
        committed = table.load(file)["kernels"]
        assert set(committed) == set(entries) and len(quick) in count
        for name, found in committed.items():
            fits(name, entries[name], found)

    return test_compiles_as_planned, test_the_table_is_complete_and_as_planned
