"""generate: the public function, its checks, and the loop of greedy decoding and sampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import _check
from ..nn import _arguments
from ..nn.evaluation import evaluating
from .beam import beam_search
from .decoder import Decoder, Unpadded
from .sampling import shaped
from .task import Task, task_of

_NAME = "generate"


@torch.no_grad()
def generate(
    model: nn.Module,
    ids: Tensor,
    max_new_tokens: int,
    *,
    attention_mask: Tensor | None = None,
    bos_id: int | None = None,
    eos_id: int | Sequence[int] | None = None,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    use_cache: bool = True,
) -> Tensor:
    """Continue texts, or translate sentences, token by token.

    Decoder-only models continue each row of ``ids``. Encoder-decoder models read ``ids`` as source sentences and write
    targets that begin with ``bos_id``. Each step takes the most probable next token (greedy); or draws it
    (``do_sample``); or keeps the ``num_beams`` best prefixes (beam search). A row ends with its first stop token, which
    is part of the result, or after ``max_new_tokens``. Padding is never generated. The model runs in evaluation mode,
    and is in the mode it was in afterwards.

    Beam search returns the continuation of the highest value among those it finds: the sum of its tokens'
    log-probabilities over n**length_penalty, n being the number of its tokens, stop token included. Finished
    continuations compete among the num_beams best extensions of a step, and a sentence goes on until none of its beams
    can beat the best finished one.

    Args:
        model: a ``CausalLanguageModel``, a ``TranslationTransformer``, or a transformers model that generates, patched
            or not.
        ids: (B, T) int64 or int32. Rows may hold padding anywhere, which is taken out of prompts and hidden in
            sources: pad_id of our models' configurations, pad_token_id of transformers' ones; where that is None
            nothing is padding, and where it also stops only what lies at the ends of a row (of a row of nothing else
            the last one is a token; our models take none for one).
        max_new_tokens: how many tokens to add at most, at least 1.
        attention_mask: (B, T) bool or integers, as tokenizers give it: 0 where ``ids`` holds padding; None: the pad
            token tells, as it always does in our models. Not for a ``TranslationTransformer``.
        bos_id: the token that targets begin with; only for encoder-decoder models, where transformers' configurations
            have a default, decoder_start_token_id.
        eos_id: the stop token, or several; None stops nowhere, for transformers' models at their configuration's.
        num_beams: K; 1 is no beam search.
        length_penalty: of beam search; above 0 favours long results, below 0 short ones, 0 compares sums.
        do_sample: draw tokens, from torch's generator of the ids' device: the same ``torch.manual_seed`` repeats them.
        temperature: the scores are divided by it before probabilities are made of them.
        top_k: draw among the k most probable tokens only.
        top_p: draw among the fewest most probable tokens whose probabilities, after top_k, together reach p.
        use_cache: keep keys and values from step to step; False runs all tokens again at each step, for comparison.

    Returns:
        (B, n) of ids' dtype and device: the prompt (without its padding) or ``bos_id``, then the new tokens; padded on
        the right with pad_id, where there is none with the first stop token, or 0. n is the longest row.

    Raises:
        TypeError, ValueError: an argument is wrong, or does not go with another one or with the model.

    Numerics: with a cache a step computes for its new tokens what the full forward computes for them, to rounding.
        Probabilities in float32 (float64 for float64), the sums of beam search in float64.
    Cost: with a cache, one position of the stack per token and row, plus reading the keys and values so far. Memory
        2 * layers * rows * (T + max_new_tokens) * d_model numbers, reserved once; beams share the keys and values of
        their source sentence.
    Source: Wu et al. 2016, arXiv:1609.08144, section 7, for beams and length; Fan et al. 2018, arXiv:1805.04833,
        section 5, for top-k; Holtzman et al. 2019, arXiv:1904.09751, section 3, for top-p.

    Example:
        >>> config = tfk.models.CausalLanguageConfig(100, 2, d_model=16, nhead=2)
        >>> generate(tfk.models.CausalLanguageModel(config), torch.tensor([[5, 6, 7]]), 4).shape
        torch.Size([1, 7])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{_NAME}: model must be a module, got {type(model).__name__}")
    _check_ids(ids)
    tokens, stops = _tokens(attention_mask, ids), _stops(eos_id)
    _arguments.size(_NAME, "max_new_tokens", max_new_tokens)
    _arguments.size(_NAME, "num_beams", num_beams)
    _check_search(num_beams, length_penalty, do_sample, temperature, top_k, top_p, use_cache)
    with evaluating(model):
        task = task_of(model, ids, tokens, max_new_tokens, bos_id, stops, use_cache)
        stops = task.stops if stops is None else _below(stops, task.vocab)
        pad = task.pad_id if task.pad_id is not None else (stops[0] if stops else 0)
        decoder = task.decoder if task.pad_id is None or pad in stops else Unpadded(task.decoder, pad)
        scores = decoder.start(task.prompts, task.lengths)
        if num_beams > 1:
            found = beam_search(decoder, scores, max_new_tokens, num_beams, length_penalty, stops)
        else:
            pick = _draw(temperature, top_k, top_p) if do_sample else _most_probable
            found = _one_by_one(decoder, scores, max_new_tokens, stops, pick)
    return _joined(task, *found, pad).to(ids.dtype)


def _one_by_one(
    decoder: Decoder, scores: Tensor, steps: int, stops: list[int], pick: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """(new tokens (B, n), how many of them count (B,))."""
    batch, device = scores.shape[0], scores.device
    tokens = torch.zeros(batch, steps, dtype=torch.int64, device=device)
    counts = torch.full((batch,), steps, device=device)
    running = torch.ones(batch, dtype=torch.bool, device=device)
    stop = torch.tensor(stops, dtype=torch.int64, device=device)
    for n in range(steps):
        token = pick(scores)
        tokens[:, n] = token
        if stops:
            ended = running & torch.isin(token, stop)
            counts = counts.masked_fill(ended, n + 1)
            running = running & ~ended
            if not bool(running.any()):
                return tokens[:, : n + 1], counts
        if n + 1 < steps:
            scores = decoder.step(token)
    return tokens, counts


def _most_probable(scores: Tensor) -> Tensor:
    return scores.max(-1).indices  # a third of the time of argmax on a CPU


def _draw(temperature: float, top_k: int | None, top_p: float | None) -> Callable[[Tensor], Tensor]:
    return lambda scores: torch.multinomial(shaped(scores, temperature, top_k, top_p), 1).squeeze(1)


def _joined(task: Task, new: Tensor, counts: Tensor, pad: int) -> Tensor:
    """Each row's prompt and as many of its new tokens as count, then ``pad``."""
    batch, width = task.prompts.shape
    if task.lengths is None:
        columns = torch.arange(new.shape[1], device=new.device)
        return torch.cat([task.prompts, new.masked_fill(columns >= counts.unsqueeze(1), pad)], 1)
    joined = torch.full((batch, width + new.shape[1]), pad, dtype=new.dtype, device=new.device)
    joined[:, :width] = task.prompts
    columns = torch.arange(joined.shape[1], device=new.device) - task.lengths.unsqueeze(1)  # of the new tokens
    inside = (columns >= 0) & (columns < counts.unsqueeze(1))
    joined = torch.where(inside, new.gather(1, columns.clamp(0, new.shape[1] - 1)), joined)
    joined = joined.masked_fill(columns >= counts.unsqueeze(1), pad)
    return joined[:, : int((task.lengths + counts).max())]


def _stops(eos_id: Any) -> list[int] | None:
    if eos_id is None:
        return None
    given = [eos_id] if isinstance(eos_id, int) else eos_id
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise TypeError(f"{_NAME}: eos_id must be an int, a sequence of ints or None, got {type(given).__name__}")
    for token in given:
        _arguments.size(_NAME, "eos_id", token, 0)
    return sorted(set(given))


def _below(stops: list[int], vocab: int) -> list[int]:
    if stops and stops[-1] >= vocab:
        raise ValueError(f"{_NAME}: eos_id must be below the vocabulary size {vocab}, got {stops[-1]}")
    return stops


def _tokens(attention_mask: Any, ids: Tensor) -> Tensor | None:
    """(B, T) bool: what of ``ids`` is no padding."""
    _check.tensor(_NAME, "attention_mask", attention_mask, optional=True)
    if attention_mask is None:
        return None
    _check.shape(_NAME, "attention_mask", attention_mask, tuple(ids.shape), "ids", ids)
    if attention_mask.is_floating_point() or attention_mask.is_complex():
        raise TypeError(f"{_NAME}: attention_mask must be bool or of integers, got {_check.dtype_name(attention_mask)}")
    if attention_mask.dtype.is_signed and bool((attention_mask < 0).any()):
        raise ValueError(f"{_NAME}: attention_mask must be 0 where padding is, else 1, got {int(attention_mask.min())}")
    return attention_mask.to(ids.device) != 0


def _check_ids(ids: object) -> None:
    _check.tensor(_NAME, "ids", ids)
    assert isinstance(ids, Tensor)
    if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 2 or 0 in ids.shape:
        raise ValueError(
            f"{_NAME}: ids must be an int32 or int64 tensor of shape (B, T), neither of them 0, got "
            f"{_check.dtype_name(ids)} of shape {tuple(ids.shape)}"
        )


def _check_search(
    num_beams: int,
    length_penalty: float,
    do_sample: bool,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    use_cache: bool,
) -> None:
    """Refuses settings that say nothing, or that do not go together."""
    for name, flag in (("do_sample", do_sample), ("use_cache", use_cache)):
        if not isinstance(flag, bool):
            raise TypeError(f"{_NAME}: {name} must be True or False, got {flag!r}")
    _check.number(_NAME, "length_penalty", length_penalty)
    _check.number(_NAME, "temperature", temperature)
    if not math.isfinite(length_penalty):
        raise ValueError(f"{_NAME}: length_penalty must be a finite number, got {length_penalty}")
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"{_NAME}: temperature must be a finite number > 0, got {temperature}")
    if top_k is not None:
        _arguments.size(_NAME, "top_k", top_k)
    if top_p is not None:
        _check.number(_NAME, "top_p", top_p)
        if not 0.0 < top_p <= 1.0:
            raise ValueError(f"{_NAME}: top_p must lie in (0, 1], got {top_p}")
    if do_sample and num_beams > 1:
        raise ValueError(f"{_NAME}: do_sample needs num_beams=1, got {num_beams}")
    for name, idle in (
        ("temperature", temperature == 1.0),
        ("top_k", top_k is None),
        ("top_p", top_p is None),
    ):
        if not do_sample and not idle:
            raise ValueError(f"{_NAME}: {name} needs do_sample=True, got do_sample=False")
    if num_beams == 1 and length_penalty != 1.0:
        raise ValueError(f"{_NAME}: length_penalty needs num_beams > 1, got num_beams=1")
