"""Batches of examples of similar length, in an order that a seed decides and a position resumes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from . import seeds


@dataclass(frozen=True)
class Position:
    """Where in the data a run is.

    Attributes:
        epoch: how many whole passes are done.
        index: how many batches of this pass are done.
    """

    epoch: int = 0
    index: int = 0


class TokenBatches:
    """Packs examples so that a padded batch has at most ``max_tokens`` tokens, each example once an epoch.

    Examples of one length are shuffled among one another, batches are made of neighbours in length, and the batches
    are shuffled: all by (seed, epoch), so that the order of an epoch can be made again without those before it.

    Args:
        lengths: tokens of every example.
        max_tokens: of a batch, padding included: examples times the longest of them.
        seed: of the order.
        max_examples: of a batch, None for no limit.
        shuffle: False keeps the order by length, the same in every epoch.

    Raises:
        ValueError: there is no example, or one alone has more than ``max_tokens``.

    Example:
        >>> TokenBatches([3, 9, 4, 2], 9, seed=0, shuffle=False).epoch(0)
        [[3, 0], [2], [1]]
    """

    def __init__(
        self,
        lengths: Sequence[int],
        max_tokens: int,
        seed: int,
        *,
        max_examples: int | None = None,
        shuffle: bool = True,
    ) -> None:
        if not lengths:
            raise ValueError("TokenBatches: lengths must hold at least one example, got none")
        longest = max(lengths)
        if longest > max_tokens:
            raise ValueError(
                f"TokenBatches: max_tokens must be at least the longest example, {longest}, got {max_tokens}"
            )
        self.lengths, self.max_tokens, self.seed = list(lengths), max_tokens, seed
        self.max_examples, self.shuffle = max_examples or len(lengths), shuffle

    def epoch(self, number: int) -> list[list[int]]:
        """Every batch of one pass, as lists of example numbers."""
        order = list(range(len(self.lengths)))
        random = seeds.generator(self.seed, "order", number)
        if self.shuffle:
            order = torch.randperm(len(order), generator=random).tolist()
        order.sort(key=self.lengths.__getitem__)  # stable: equal lengths stay shuffled
        batches: list[list[int]] = [[]]
        for example in order:  # from short to long, so the newest is the longest
            full = (len(batches[-1]) + 1) * self.lengths[example] > self.max_tokens
            if batches[-1] and (full or len(batches[-1]) == self.max_examples):
                batches.append([])
            batches[-1].append(example)
        if self.shuffle:
            batches = [batches[at] for at in torch.randperm(len(batches), generator=random).tolist()]
        return batches

    def after(self, position: Position) -> Iterator[tuple[int, list[int], Position]]:
        """Goes on from a position, without end.

        Yields:
            (epoch, example numbers, the position after this batch).
        """
        epoch, index = position.epoch, position.index
        while True:
            batches = self.epoch(epoch)
            for at in range(index, len(batches)):
                last = at + 1 == len(batches)
                yield epoch, batches[at], Position(epoch + 1, 0) if last else Position(epoch, at + 1)
            epoch, index = epoch + 1, 0
