"""A number of threads for a while."""

from contextlib import contextmanager

import torch


@contextmanager
def on_threads(count):
    """Runs the block with ``count`` threads, and sets back how many there were."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
