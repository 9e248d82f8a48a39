"""The data of the four tasks: which examples there are, how long they are, and how some of them become a batch.

A batch is ``(inputs, targets)``: ``model(*inputs)`` gives logits (..., V), and ``targets`` (...) says which class is
right or that it is IGNORED. One loop trains all four.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from . import seeds
from .loss import IGNORED
from .masking import mask_tokens
from .text_file import InputError
from .vocabulary import END, MASK, PAD, SPECIALS, START, Vocabulary

Batch = tuple[tuple[Tensor, ...], Tensor]


class Examples(Protocol):
    """What the training loop needs of a dataset.

    Attributes:
        lengths: tokens of every example, as TokenBatches counts them.
    """

    lengths: list[int]

    def batch(self, chosen: Sequence[int], epoch: int) -> Batch:
        """The examples of these numbers, padded; ``epoch`` decides what is drawn anew in each pass."""
        ...


class Rows:
    """Lists of token numbers, 4 bytes a token: a corpus of millions of sentences fits where lists would not.

    Args:
        rows: read once.
    """

    def __init__(self, rows: Iterable[Sequence[int]] = ()) -> None:
        self._tokens, self._ends = array("i"), array("q", [0])
        for row in rows:
            self.append(row)

    def append(self, row: Sequence[int]) -> None:
        """One more list at the end."""
        self._tokens.extend(row)
        self._ends.append(len(self._tokens))

    def __getitem__(self, at: int) -> list[int]:
        return self._tokens[self._ends[at] : self._ends[at + 1]].tolist()

    def __len__(self) -> int:
        return len(self._ends) - 1

    @property
    def lengths(self) -> list[int]:
        """Of every list."""
        return [end - begin for begin, end in zip(self._ends, self._ends[1:], strict=False)]


def padded(rows: Sequence[Sequence[int]], filler: int = PAD) -> Tensor:
    """(rows, longest row) int64, filled up at the end with ``filler``."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[filler] * (longest - len(row))] for row in rows])


class TranslationExamples:
    """Pairs of sentences: inputs (source, <start> target), targets (target <end>).

    Args:
        pairs: of texts.
        source: vocabulary of the first of each pair.
        target: vocabulary of the second, which may be the same one.
        max_length: pairs with a longer half are left out, because a cut sentence teaches to cut.

    Raises:
        InputError: no pair is short enough.
    """

    def __init__(
        self, pairs: Sequence[tuple[str, str]], source: Vocabulary, target: Vocabulary, max_length: int
    ) -> None:
        self.sources, self.targets = Rows(), Rows()
        for one, other in pairs:
            ids = [*source.encode(one), END], [START, *target.encode(other), END]
            if max(map(len, ids)) <= max_length:
                self.sources.append(ids[0])
                self.targets.append(ids[1])
        self.left_out = len(pairs) - len(self.sources)
        if not len(self.sources):
            raise InputError(f"all {len(pairs):,} pairs have a sentence of more than {max_length} tokens")
        self.lengths = [max(both) for both in zip(self.sources.lengths, self.targets.lengths, strict=True)]

    def batch(self, chosen: Sequence[int], epoch: int) -> Batch:
        """((source (B, Ts), target (B, Tt)), next target (B, Tt)); the same in every epoch."""
        targets = [self.targets[at] for at in chosen]
        inputs = padded([self.sources[at] for at in chosen]), padded([row[:-1] for row in targets])
        return inputs, padded([row[1:] for row in targets], IGNORED)


class LabelledExamples:
    """Texts with a label: inputs (<start> text <end>), target the label's number.

    Args:
        rows: (text, label).
        vocabulary: of the texts.
        labels: every label there is; a label's number is its place.
        max_length: longer texts are cut; ``cut`` is how many were.
        source: name of the file in the error sentence.

    Raises:
        InputError: a label is not among ``labels``.
    """

    def __init__(
        self,
        rows: Sequence[tuple[str, str]],
        vocabulary: Vocabulary,
        labels: Sequence[str],
        max_length: int,
        source: str = "the text",
    ) -> None:
        numbers = {label: at for at, label in enumerate(labels)}
        unknown = sorted({label for _, label in rows} - set(labels))
        if unknown:
            raise InputError(f"{source} has the unknown label {unknown[0]!r}; known are {', '.join(labels)}")
        self.texts, self.cut = _enclosed_rows([text for text, _ in rows], vocabulary, max_length)
        self.labels = torch.tensor([numbers[label] for _, label in rows])
        self.lengths = self.texts.lengths

    def batch(self, chosen: Sequence[int], epoch: int) -> Batch:
        """((ids (B, T),), label (B,)); the same in every epoch."""
        return (padded([self.texts[at] for at in chosen]),), self.labels[list(chosen)]


class MaskedExamples:
    """Lines with hidden tokens: inputs (<start> line <end>, masked), targets the hidden tokens.

    What is hidden depends on seed, epoch and example alone, however the examples are batched.

    Args:
        lines: of text.
        vocabulary: of them.
        max_length: longer lines are cut; ``cut`` is how many were.
        seed: of the masks.
        share: of the tokens that are to be predicted.
    """

    def __init__(
        self, lines: Sequence[str], vocabulary: Vocabulary, max_length: int, seed: int, share: float = 0.15
    ) -> None:
        self.rows, self.cut = _enclosed_rows(lines, vocabulary, max_length)
        self.lengths = self.rows.lengths
        self.vocab_size, self.seed, self.share = vocabulary.size, seed, share

    def batch(self, chosen: Sequence[int], epoch: int) -> Batch:
        """((masked ids (B, T),), hidden ids (B, T))."""
        pairs = [
            mask_tokens(
                torch.tensor(self.rows[at]),
                vocab_size=self.vocab_size,
                mask_id=MASK,
                first_ordinary=len(SPECIALS),
                random=seeds.generator(self.seed, "mask", epoch, at),
                share=self.share,
            )
            for at in chosen
        ]
        stacked = torch.nn.utils.rnn.pad_sequence
        inputs, targets = [one for one, _ in pairs], [other for _, other in pairs]
        return (stacked(inputs, True, PAD),), stacked(targets, True, IGNORED)


class LineExamples:
    """Lines to be continued, one by one: inputs (<start> line), targets (line <end>).

    Args:
        lines: of text.
        vocabulary: of them.
        max_length: longer lines are cut, and have no <end> where they are; ``cut`` is how many were.
    """

    def __init__(self, lines: Sequence[str], vocabulary: Vocabulary, max_length: int) -> None:
        self.rows, self.cut = Rows(), 0
        for line in lines:
            ids = [START, *vocabulary.encode(line), END]
            self.cut += len(ids) > max_length + 1
            self.rows.append(ids[: max_length + 1])
        self.lengths = [length - 1 for length in self.rows.lengths]

    def batch(self, chosen: Sequence[int], epoch: int) -> Batch:
        """((ids (B, T),), next ids (B, T)); the same in every epoch."""
        rows = [self.rows[at] for at in chosen]
        return (padded([row[:-1] for row in rows]),), padded([row[1:] for row in rows], IGNORED)


class StreamExamples:
    """Windows of one long text: inputs ``context`` tokens, targets the same shifted by one.

    The windows of an epoch do not overlap; where the first one begins is drawn for each epoch, so that over the epochs
    every token is seen at every place of the window.

    Args:
        ids: the text's tokens, (T,) int64 or a list.
        context: tokens of a window.
        seed: of the beginnings; None begins at the first token in every epoch.
        source: name of the text in the error sentence.

    Raises:
        InputError: the text has fewer than two windows, or without a seed fewer than a window and a token.
    """

    def __init__(self, ids: Sequence[int] | Tensor, context: int, seed: int | None, source: str = "the text") -> None:
        self.ids, self.context, self.seed = torch.as_tensor(ids), context, seed
        drawn = 0 if seed is None else context - 1  # where the first window may begin, at most
        least = context + drawn + 1  # with the token that the last one of a window predicts
        if len(self.ids) < least:
            raise InputError(f"{source} must have at least {least:,} tokens, got {len(self.ids):,}")
        self.lengths = [context] * ((len(self.ids) - drawn - 1) // context)

    def batch(self, chosen: Sequence[int], epoch: int) -> Batch:
        """((ids (B, context),), next ids (B, context))."""
        first = 0 if self.seed is None else seeds.derive(self.seed, "window", epoch) % self.context
        starts = [first + at * self.context for at in chosen]
        windows = torch.stack([self.ids[start : start + self.context + 1] for start in starts])
        return (windows[:, :-1].contiguous(),), windows[:, 1:].contiguous()


def enclosed(ids: Sequence[int], max_length: int) -> list[int]:
    """<start> text <end>, the text cut so that all of it has at most ``max_length`` tokens."""
    return [START, *ids[: max_length - 2], END]


def _enclosed_rows(texts: Sequence[str], vocabulary: Vocabulary, max_length: int) -> tuple[Rows, int]:
    """Each text as ``enclosed``, and how many had to be cut."""
    rows, cut = Rows(), 0
    for text in texts:
        ids = vocabulary.encode(text)
        cut += len(ids) > max_length - 2
        rows.append(enclosed(ids, max_length))
    return rows, cut
