"""Rotary positions as models of transformers write them, by ops.rotary: which features pair up, and by what factors.

A model's file says it by two functions: ``apply_rotary_pos_emb``, and the one which that turns the pairs with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import _backend, ops
from . import huggingface, source
from .known import Known
from .registry import backend


def _as_given(factors: Tensor) -> Tensor:
    return factors


def _each_twice(factors: Tensor) -> Tensor:
    return factors.repeat_interleave(2, dim=-1)


def _first_half_twice(factors: Tensor) -> Tensor:
    return _each_twice(factors[..., : factors.shape[-1] // 2])


def _together(own: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return own(query, key, cos, sin)


def _one_by_one(own: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """As GPT-J's is called, with (B, T, H, D)."""
    return tuple(own(x.transpose(1, 2), sin, cos).transpose(1, 2) for x in (query, key))


@dataclass(frozen=True)
class Turn:
    """How one pair of such functions turns.

    Attributes:
        interleaved: as ops.rotary has it.
        factors: factors(cos) gives a factor for every feature that is turned, from what the model has.
        narrow: whether they compute in float32 whatever the dtype, float64 too.
        own: own(apply_rotary_pos_emb, query, key, cos, sin) calls it with (B, H, T, D).
    """

    interleaved: bool = False
    factors: Callable[[Tensor], Tensor] = _as_given
    narrow: bool = False
    own: Callable[..., Any] = _together


_ROTATE_HALF, _ROTATE_PAIRS = "d13566b44750", "f26eb4aac4a3"
_HALVES, _PAIRS = Turn(), Turn(True, _first_half_twice)
# fingerprints of transformers 5.23 and 5.24 (source.py): apply_rotary_pos_emb and what it calls
_TURNS = {
    ("137d53615941", _ROTATE_HALF): _HALVES,  # the whole of what it is given: Llama and most others
    ("ac79818ce30e", _ROTATE_HALF): _HALVES,  # a part of a head: GPT-NeoX
    ("f43e6c870a47", _ROTATE_HALF): _HALVES,  # Phi-3
    ("6cd4c97b0fc9", _ROTATE_HALF): _HALVES,  # Nemotron
    ("c98b5941dddf", _ROTATE_HALF): _HALVES,  # with the result in the dtype that came: Olmo
    ("6135a22be078", _ROTATE_HALF): Turn(narrow=True),  # ModernBERT
    ("5e1e24c840fd", "0fee3e15bc25"): Turn(True, narrow=True),  # Cohere
    ("9362fef7a258", _ROTATE_PAIRS): _PAIRS,  # a part of a head: GLM
    ("2c1b53053e53", _ROTATE_PAIRS): _PAIRS,  # Helium
    ("7aa7580c375f", _ROTATE_PAIRS): Turn(True, _first_half_twice, narrow=True),  # Ernie 4.5
    ("50dc365db7bd", "e94cde76e423"): Turn(True, _each_twice, own=_one_by_one),  # GPT-J, CodeGen
}


def _turn_of(module: nn.Module) -> Turn | None:
    """What the file of a module's class turns by; None where ops.rotary does not know it."""
    own = huggingface.file_of(module)
    apply = source.fingerprint(getattr(own, "apply_rotary_pos_emb", len))
    pairs = getattr(own, "rotate_half", None) or getattr(own, "rotate_every_two", len)
    return _TURNS.get((apply, source.fingerprint(pairs)))  # type: ignore[arg-type]


def turns(known: Known) -> Callable[[nn.Module], bool]:
    """What recognises an attention of this code, in whose file rotary positions are those of ops.rotary."""

    def recognise(module: nn.Module) -> bool:
        """What is not known still has its attention as its model calls it, and is no failure."""
        return known.recognise(module) is True and _turn_of(module) is not None

    return recognise


def turned(module: nn.Module, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Query and key (B, H, T, D) by their positions; as the model's own function does it where ops.rotary cannot.

    The first features of each head are turned, as many as cos and sin have factors for.
    """
    turn = _turn_of(module)
    if (
        turn is None  # what the file turned by when it was recognised has been replaced since
        or cos.shape[-2] != query.shape[-2]  # one position for all tokens
        or not _backend.offers("rotary")
        or any(cos.dtype not in (t.dtype, torch.float32) for t in (query, key))
        or turn.narrow
        and query.dtype == torch.float64
    ):
        return _by_their_own(module, turn or Turn(), query, key, cos, sin)
    named = backend(module)  # meant for those of the fused ops that have it
    named = named if named in _backend.OPS["rotary"].support else None
    cos, sin = turn.factors(cos), turn.factors(sin)
    query, key = (ops.rotary(x, cos, sin, interleaved=turn.interleaved, backend=named) for x in (query, key))
    return query, key


def _by_their_own(
    module: nn.Module, turn: Turn, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    own, width = huggingface.file_of(module).apply_rotary_pos_emb, turn.factors(cos).shape[-1]
    if width == query.shape[-1]:
        return turn.own(own, query, key, cos, sin)
    parts = turn.own(own, query[..., :width], key[..., :width], cos, sin)
    q, k = (torch.cat((part, x[..., width:]), dim=-1) for part, x in zip(parts, (query, key), strict=True))
    return q, k
