"""Which parameters of tests that every backend has `make test` runs where a kernel takes seconds; the rest are slow."""

import pytest


def mark_others_slow(items, folder, quick):
    """For a conftest.py's pytest_collection_modifyitems.

    Args:
        items: what was collected.
        folder: the conftest's own.
        quick: file name -> test -> ids of its parameters that stay as they are.
    """
    found = {}
    for item in items:
        if item.path.parent == folder and (ids := quick.get(item.path.name, {}).get(item.originalname)) is not None:
            found.setdefault((item.path.name, item.originalname), []).append(item.callspec.id)
            if item.callspec.id not in ids:
                item.add_marker(pytest.mark.slow)
    for (file, test), all_of in found.items():
        lost = set(quick[file][test]) - set(all_of)
        one_by_name = len(all_of) <= len(quick[file][test])  # whoever asks for a test alone collects no other
        if lost and not one_by_name:
            raise pytest.UsageError(f"{file}::{test} has no parameters {lost}")
