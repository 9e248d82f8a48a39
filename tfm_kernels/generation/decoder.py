"""What a search needs of a model: the scores of the next token, step by step, whoever keeps what in between."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..models import CausalLanguageModel, TranslationTransformer
from ..models.padding import Padding
from ..nn._projection import through
from ..nn.cache import GrowingCache, MemoryCache


class Decoder(Protocol):
    """One decoding: rows of tokens that grow by one token at each step."""

    def start(self, ids: Tensor, lengths: Tensor | None) -> Tensor:
        """Takes the first tokens (B, T), padded on the right to ``lengths`` (B,); scores (B, V) of the next ones."""

    def step(self, tokens: Tensor) -> Tensor:
        """Takes one more token of each row, (R,); scores (R, V) of the next ones."""

    def expand(self, times: int) -> None:
        """Every row becomes ``times`` rows, one behind the other."""

    def reorder(self, index: Tensor) -> None:
        """Row i becomes what row ``index``[i] was; a row is only replaced by one of the same sentence."""


class Unpadded:
    """A decoder that never gives its padding token a chance.

    Args:
        decoder: whose scores are changed.
        pad_id: the token.
    """

    def __init__(self, decoder: Decoder, pad_id: int) -> None:
        self.decoder, self.pad_id = decoder, pad_id
        self.expand, self.reorder = decoder.expand, decoder.reorder

    def start(self, ids: Tensor, lengths: Tensor | None) -> Tensor:
        """See ``Decoder``."""
        return self._without(self.decoder.start(ids, lengths))

    def step(self, tokens: Tensor) -> Tensor:
        """See ``Decoder``."""
        return self._without(self.decoder.step(tokens))

    def _without(self, scores: Tensor) -> Tensor:
        scores[:, self.pad_id] = -torch.inf
        return scores


class CachedDecoder:
    """Our causal and translation models, with the keys and values of all positions kept.

    Args:
        model: a ``CausalLanguageModel`` or a ``TranslationTransformer``.
        size: the longest row there will be.
        source: what a translation model translates, (B, Ts).
    """

    def __init__(self, model: CausalLanguageModel | TranslationTransformer, size: int, source: Tensor | None) -> None:
        self.model, self.cache = model, GrowingCache(size)
        if isinstance(model, TranslationTransformer):
            assert source is not None
            self.memory, found = model.encode(source)
            self.across = MemoryCache(found.mask)

    def start(self, ids: Tensor, lengths: Tensor | None) -> Tensor:
        """See ``Decoder``."""
        x = self._features(ids, None)
        if lengths is None:
            return through(self.model.output, x[:, -1])
        self.cache.lengths = lengths
        rows = torch.arange(ids.shape[0], device=ids.device)
        return through(self.model.output, x[rows, lengths - 1])

    def step(self, tokens: Tensor) -> Tensor:
        """See ``Decoder``."""
        lengths = self.cache.lengths
        x = self._features(tokens[:, None], None if lengths is None else lengths[:, None])
        return through(self.model.output, x[:, 0])

    def expand(self, times: int) -> None:
        """See ``Decoder``."""
        self.cache.expand(times)

    def reorder(self, index: Tensor) -> None:
        """See ``Decoder``."""
        self.cache.reorder(index)

    def _features(self, ids: Tensor, positions: Tensor | None) -> Tensor:
        cache, model = self.cache, self.model
        cache.prepare(ids.shape[1])
        x = model.embedding(ids, positions, cache.length)
        if isinstance(model, TranslationTransformer):
            x = model.transformer.decoder(x, self.memory, tgt_mask=cache, memory_mask=self.across)
        else:
            x = model.encoder(x, mask=cache)
        cache.advance()
        return x


class FullDecoder:
    """Our models without a cache: every step runs all tokens so far. The source of a translation is encoded once.

    Args:
        model: a ``CausalLanguageModel`` or a ``TranslationTransformer``.
        source: what a translation model translates, (B, Ts).
    """

    def __init__(self, model: CausalLanguageModel | TranslationTransformer, source: Tensor | None) -> None:
        self.model = model
        self.memory: tuple[Tensor, Padding] | None = None
        if isinstance(model, TranslationTransformer):
            assert source is not None
            self.source, self.memory = source, model.encode(source)

    def start(self, ids: Tensor, lengths: Tensor | None) -> Tensor:
        """See ``Decoder``."""
        self.ids = ids
        self.lengths = torch.full(ids.shape[:1], ids.shape[1], device=ids.device) if lengths is None else lengths
        return self._scores()

    def step(self, tokens: Tensor) -> Tensor:
        """See ``Decoder``."""
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        self.ids = torch.cat([self.ids, torch.full_like(self.ids[:, :1], self.model.config.pad_id or 0)], 1)
        self.ids[rows, self.lengths] = tokens
        self.lengths = self.lengths + 1
        return self._scores()

    def expand(self, times: int) -> None:
        """See ``Decoder``."""
        self.ids, self.lengths = self.ids.repeat_interleave(times, 0), self.lengths.repeat_interleave(times, 0)
        if isinstance(self.model, TranslationTransformer):
            self.memory = self.model.encode(self.source.repeat_interleave(times, 0))

    def reorder(self, index: Tensor) -> None:
        """See ``Decoder``."""
        self.ids, self.lengths = self.ids[index], self.lengths[index]

    def _scores(self) -> Tensor:
        if isinstance(self.model, TranslationTransformer):
            assert self.memory is not None
            memory, found = self.memory
            x = self.model.decode(self.ids, memory, found.mask)
        else:
            x = self.model.features(self.ids)
        rows = torch.arange(self.ids.shape[0], device=self.ids.device)
        return self.model.output(x[rows, self.lengths - 1])
