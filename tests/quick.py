"""Which parameters of tests that every backend has `make test` runs where a kernel takes seconds; the rest are slow."""

import pytest


def mark_others_slow(items, folder, quick):
    """For a conftest.py's pytest_collection_modifyitems.

    Args:
        items: what was collected.
        folder: the conftest's own.
        quick: file name -> test -> ids of its parameters that stay as they are, or what tells of an id whether it does.
    """
    found = {}
    for item in items:
        if item.path.parent == folder and (ids := quick.get(item.path.name, {}).get(item.originalname)) is not None:
            found.setdefault((item.path.name, item.originalname), []).append(item.callspec.id)
            if not (ids(item.callspec.id) if callable(ids) else item.callspec.id in ids):
                item.add_marker(pytest.mark.slow)
    for (file, test), all_of in found.items():
        ids = quick[file][test]
        lost = set() if callable(ids) else set(ids) - set(all_of)
        if lost and len(all_of) > len(ids):  # whoever asks for a parameter alone collects no other
            raise pytest.UsageError(f"{file}::{test} has no parameters {lost}")
