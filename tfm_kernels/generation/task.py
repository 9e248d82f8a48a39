"""From the arguments of generate to what a search works on: prompts without padding, and a decoder of the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .._transformers import is_model
from ..models import CausalLanguageModel, TranslationTransformer
from ..nn import _arguments
from . import huggingface
from .decoder import CachedDecoder, Decoder, FullDecoder

_NAME = "generate"


@dataclass(frozen=True, eq=False)
class Task:
    """What is to be continued, and by whom.

    Attributes:
        decoder: the model as a search sees it.
        prompts: (B, T) int64, the rows' first tokens, padded on the right.
        lengths: (B,) how many they are, None where all have T.
        vocab: V.
        pad_id: the token that is padding, None where there is none.
        stops: the stop tokens where the caller named none.
    """

    decoder: Decoder
    prompts: Tensor
    lengths: Tensor | None
    vocab: int
    pad_id: int | None
    stops: list[int]


def task_of(
    model: nn.Module, ids: Tensor, tokens: Tensor | None, new: int, bos_id: int | None, stops: list[int] | None,
    use_cache: bool,
) -> Task:  # fmt: skip
    """The task of one ``generate`` call; refuses what the model cannot do.

    ``tokens`` (B, T) bool: what of ``ids`` is no padding, None: the pad token tells. ``stops``: those that the caller
    named, None for none.
    """
    decoder: Decoder
    if isinstance(model, TranslationTransformer):
        _check_values(ids, model.config.source_vocab)
        if tokens is not None:
            raise ValueError(f"{_NAME}: attention_mask must be None for a TranslationTransformer, whose pad_id tells")
        prompts, lengths = _first_tokens(model, ids, bos_id, model.config.target_vocab), None
        vocab, source = model.config.target_vocab, ids
    elif isinstance(model, CausalLanguageModel):
        _check_values(ids, model.config.vocab)
        _no_bos(model, bos_id)
        shown = no_padding(ids, model.config.pad_id, [])  # the model itself hides it wherever it stands
        if shown is not None and tokens is not None:
            shown = shown & tokens
        prompts, lengths = without_padding(ids.long(), tokens if shown is None else shown)
        vocab, source = model.config.vocab, None
    elif is_model(model):
        return _of_transformers(model, ids, tokens, new, bos_id, stops, use_cache)
    else:
        raise TypeError(
            f"{_NAME}: model must be a CausalLanguageModel, a TranslationTransformer or a transformers model that "
            f"generates, got {type(model).__name__}"
        )
    size = prompts.shape[1] + new - 1  # the last token is not read
    _check_size(size, model.config.max_length, "max_length")
    decoder = CachedDecoder(model, size, source) if use_cache else FullDecoder(model, source)
    return Task(decoder, prompts, lengths, vocab, model.config.pad_id, [])


def _of_transformers(
    model: nn.Module, ids: Tensor, tokens: Tensor | None, new: int, bos_id: int | None, stops: list[int] | None,
    use_cache: bool,
) -> Task:  # fmt: skip
    facts = huggingface.facts(model)
    _check_values(ids, facts.vocab)
    lengths: Tensor | None = None
    tokens = no_padding(ids, facts.pad_id, facts.stops + (stops or [])) if tokens is None else tokens
    source = None
    if facts.encoder_decoder:
        first = facts.start_id if bos_id is None else bos_id
        prompts, source = _first_tokens(model, ids, first, facts.vocab), (ids, tokens)
    else:
        _no_bos(model, bos_id)
        prompts, lengths = without_padding(ids.long(), tokens)
    size = prompts.shape[1] + new - 1
    if facts.max_length is not None:
        _check_size(size, facts.max_length, "config.max_position_embeddings")
    decoder = huggingface.decoder(model, facts, size, source, use_cache)
    return Task(decoder, prompts, lengths, facts.vocab, facts.pad_id, facts.stops)


def no_padding(ids: Tensor, pad_id: int | None, stops: list[int]) -> Tensor | None:
    """(B, T) bool: what is a token rather than padding; None: everything.

    Where the pad token also stops, as the end of each turn of a conversation does, it is padding at the ends of a row
    alone, and a row of nothing else has it as its last.
    """
    if pad_id is None:
        return None
    keep = ids != pad_id
    if pad_id in stops:
        begun, to_come = keep.cumsum(1) > 0, keep.flip(1).cumsum(1).flip(1) > 0
        keep = begun & to_come
        keep[:, -1] |= ~keep.any(1)
    return keep


def without_padding(ids: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(the tokens of each row, moved to the left; how many they are, None where all rows have equally many)."""
    if keep is None:
        return ids, None
    lengths = keep.sum(1)
    longest, shortest = int(lengths.max()), int(lengths.min())
    if shortest == 0:
        row = int(lengths.argmin())
        raise ValueError(f"{_NAME}: ids must have a token in every row, got nothing but padding in row {row}")
    order = (~keep).to(torch.int8).argsort(dim=1, stable=True)
    return ids.gather(1, order)[:, :longest], None if shortest == longest else lengths


def _first_tokens(model: nn.Module, ids: Tensor, bos_id: int | None, vocab: int) -> Tensor:
    if bos_id is None:
        raise ValueError(
            f"{_NAME}: bos_id must be given for {type(model).__name__}, the token that targets begin with, got None"
        )
    _arguments.size(_NAME, "bos_id", bos_id, 0)
    if bos_id >= vocab:
        raise ValueError(f"{_NAME}: bos_id must be below the target vocabulary's size {vocab}, got {bos_id}")
    return torch.full((ids.shape[0], 1), bos_id, dtype=torch.int64, device=ids.device)


def _no_bos(model: nn.Module, bos_id: int | None) -> None:
    if bos_id is not None:
        raise ValueError(
            f"{_NAME}: bos_id must be None for {type(model).__name__}, whose prompts are given as ids, got {bos_id}"
        )


def _check_values(ids: Tensor, vocab: int) -> None:
    low, high = (int(value) for value in torch.aminmax(ids))
    if low < 0 or high >= vocab:
        raise ValueError(f"{_NAME}: ids must hold token numbers in [0, {vocab}), got values from {low} to {high}")


def _check_size(size: int, limit: int, name: str) -> None:
    if size > limit:
        raise ValueError(
            f"{_NAME}: the longest prompt and max_new_tokens - 1 must fit into {name} {limit}, got {size} positions"
        )
