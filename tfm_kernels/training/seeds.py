"""Seeds that follow from one number and a place: what is random at a step depends on nothing that came before it."""

from __future__ import annotations

import hashlib

import torch


def derive(seed: int, *place: str | int) -> int:
    """A seed for one place of a run, such as ``derive(0, "dropout", step, rank)``.

    Args:
        seed: of the whole run.
        place: words and numbers that name the place.

    Returns:
        63 bits of a hash of all of it; the same on every machine and in every version of Python.
    """
    digest = hashlib.blake2b("/".join(map(str, (seed, *place))).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(seed: int, *place: str | int) -> torch.Generator:
    """A CPU generator that starts at ``derive(seed, *place)``."""
    return torch.Generator().manual_seed(derive(seed, *place))
