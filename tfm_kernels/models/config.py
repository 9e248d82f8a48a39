"""What the configurations of all models share: the sizes of the stack, and how one sentence refuses a bad one."""

from __future__ import annotations

from dataclasses import dataclass

from .. import _check
from ..nn import _arguments
from ..nn.ffn import ACTIVATIONS

POSITIONS = ("sinusoidal", "learned")


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """The part of a configuration that every model has; the defaults are those of Vaswani et al. 2017.

    Attributes:
        d_model: E, width of embeddings and layers, a multiple of nhead.
        nhead: H, number of heads; each is d_model / nhead wide.
        dim_feedforward: F, width inside the feed-forward blocks.
        dropout: probability of every dropout, in [0, 1].
        activation: "relu" | "gelu" | "gelu_tanh" | "silu".
        norm_first: norms before the sublayers (pre-LN) instead of after them (post-LN).
        final_norm: one more norm behind each stack; None means norm_first, because a post-LN stack ends in a norm.
        layer_norm_eps: added to the variance in every norm.
        bias: False leaves the biases of all layers and norms out.
        positions: "sinusoidal" | "learned".
        max_length: the longest sequence there is.
        share_embeddings: one matrix for the embeddings and the output.
        pad_id: the token that is padding, None where every token counts.
    """

    d_model: int = 512
    nhead: int = 8
    dim_feedforward: int = 2048
    dropout: float = 0.1
    activation: str = "relu"
    norm_first: bool = False
    final_norm: bool | None = None
    layer_norm_eps: float = 1e-5
    bias: bool = True
    positions: str = "sinusoidal"
    max_length: int = 5000
    share_embeddings: bool = False
    pad_id: int | None = 0

    def __post_init__(self) -> None:
        """Refuses what no model can be built from."""
        op = type(self).__name__
        _arguments.heads(op, "d_model", self.d_model, "nhead", self.nhead)
        _arguments.size(op, "dim_feedforward", self.dim_feedforward)
        _arguments.size(op, "max_length", self.max_length)
        _check.probability(op, "dropout", self.dropout)
        _check.choice(op, "activation", self.activation, tuple(ACTIVATIONS))
        _check.choice(op, "positions", self.positions, POSITIONS)
        _check.eps(op, self.layer_norm_eps)
        for name in ("norm_first", "bias", "share_embeddings", "final_norm"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "final_norm" and value is None):
                wanted = "True, False or None" if name == "final_norm" else "True or False"
                raise TypeError(f"{op}: {name} must be {wanted}, got {value!r}")

    @property
    def has_final_norm(self) -> bool:
        """Whether each stack ends in a norm of its own."""
        return self.norm_first if self.final_norm is None else self.final_norm

    def check_vocabulary(self, name: str) -> None:
        """Refuses a vocabulary size, and a pad_id that lies outside of it."""
        op, size = type(self).__name__, getattr(self, name)
        _arguments.size(op, name, size)
        if self.pad_id is not None:
            _arguments.size(op, "pad_id", self.pad_id, 0)
            if self.pad_id >= size:
                raise ValueError(f"{op}: pad_id must be below {name} {size}, got {self.pad_id}")
