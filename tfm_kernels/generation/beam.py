"""Beam search."""

from __future__ import annotations

import torch
from torch import Tensor

from .decoder import Decoder


def beam_search(
    decoder: Decoder, scores: Tensor, steps: int, beams: int, length_penalty: float, stops: list[int]
) -> tuple[Tensor, Tensor]:
    """The best continuation of each row that a search over ``beams`` prefixes finds.

    A continuation's value is the sum of its tokens' log-probabilities over length**length_penalty, where length counts
    its tokens, the stop token among them. At each step all one-token extensions of a sentence's beams are ranked by
    their sums. Those among the best ``beams`` that end with a stop token are finished; the best ``beams`` that do not
    go on. After ``steps`` tokens the beams count as finished too. A sentence is done when no continuation of its beams
    can exceed the best finished one.

    Args:
        decoder: has taken the prompts.
        scores: (B, V) of the first new token.
        steps: how many new tokens there are at most.
        beams: K.
        length_penalty: above 0 favours long continuations, below 0 short ones.
        stops: the stop tokens.

    Returns:
        (tokens (B, n), n being the longest continuation; how many of them count, (B,)).
    """
    batch, vocab = scores.shape
    device = scores.device
    first_row = torch.arange(batch, device=device).unsqueeze(1) * beams
    decoder.expand(beams)
    scores = scores.repeat_interleave(beams, 0)
    summed = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
    sums = torch.full((batch, beams), -torch.inf, device=device, dtype=summed)
    sums[:, 0] = 0.0  # at first all beams of a sentence are the same: one of them counts
    prefixes = torch.zeros(batch, beams, 0, dtype=torch.int64, device=device)
    best = torch.full((batch,), -torch.inf, device=device, dtype=summed)
    best_tokens = torch.zeros(batch, steps, dtype=torch.int64, device=device)
    best_length = torch.zeros(batch, dtype=torch.int64, device=device)
    stop = torch.zeros(vocab, dtype=torch.bool, device=device)
    stop[stops] = True
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    ranks = min((1 + len(stops)) * beams, beams * vocab)  # so many that beams of them do not end
    for length in range(1, steps + 1):
        gains = scores.to(wide).log_softmax(-1).view(batch, beams * vocab)
        place = (sums.to(wide).repeat_interleave(vocab, 1) + gains).topk(ranks, sorted=True).indices
        beam, token = place // vocab, place % vocab
        ranked = sums.gather(1, beam) + gains.gather(1, place)
        ends = stop[token]
        finished = ends if length < steps else torch.ones_like(ends)
        values = (ranked / length**length_penalty).masked_fill(~finished, -torch.inf)[:, :beams]
        value, rank = values.max(1)
        better = value > best
        winner = torch.cat([prefixes.gather(1, _along(beam.gather(1, rank[:, None]), prefixes)),
                            token.gather(1, rank[:, None]).unsqueeze(2)], 2)  # fmt: skip
        best_tokens[:, :length] = torch.where(better.unsqueeze(1), winner[:, 0], best_tokens[:, :length])
        best_length = torch.where(better, length, best_length)
        best = torch.where(better, value, best)
        if length == steps:
            break
        sums, rank = ranked.masked_fill(ends, -torch.inf).topk(beams, sorted=True)
        beam, token = beam.gather(1, rank), token.gather(1, rank)
        prefixes = torch.cat([prefixes.gather(1, _along(beam, prefixes)), token.unsqueeze(2)], 2)
        longest = steps if length_penalty > 0 else length + 1  # the length at which a sum is worth most
        if bool((best >= sums.amax(1) / longest**length_penalty).all()):
            break
        decoder.reorder((first_row + beam).flatten())
        scores = decoder.step(token.flatten())
    return best_tokens[:, : int(best_length.max())], best_length


def _along(beam: Tensor, prefixes: Tensor) -> Tensor:
    return beam.unsqueeze(2).expand(-1, -1, prefixes.shape[2])
