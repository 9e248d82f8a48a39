"""TransformerEncoderLayer and TransformerDecoderLayer, drop-in for torch.nn's, with fused sublayers.

They subclass torch.nn's, so isinstance checks, old pickles and subclasses that override ``_sa_block``, ``_mha_block``
or ``_ff_block`` keep working. They build their children themselves, in torch's order, because the children are ours;
and as ``forward`` is new, nothing of torch's inference fast path is left. Children keep torch's names and classes
(nn.Linear, nn.Dropout): one that was replaced, or that carries hooks, is called, and the rest stays fused around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import _check
from ..mask import Mask
from . import _arguments
from ._bypass import LINEARS, dropout_p, plain, plain_linear
from .attention import MultiheadAttention
from .ffn import activation_function, activation_name, feed_forward
from .int8 import Int8Linear, Int8MultiheadAttention
from .layer_norm import NORMS, LayerNorm, RMSNorm, add, add_norm, norm_of_sum
from .packed import rows

# a sublayer's output that waits for its residual sum; its dropout; the backend of that sum
Pending = tuple[Tensor, nn.Module, str | None]
_BY_ROWS = (
    nn.modules.linear.NonDynamicallyQuantizableLinear, Int8Linear, LayerNorm, RMSNorm, nn.LayerNorm, nn.RMSNorm,
    nn.Dropout, nn.Identity,
)  # fmt: skip


# encoder layers that are ``_pre_norm`` but for nested tensors; patching adds its own
CHAINED: list[type] = []


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """x = norm1(x + dropout1(self_attn(x))); x = norm2(x + dropout2(linear2(dropout(act(linear1(x)))))).

    With norm_first: x = x + dropout1(self_attn(norm1(x))); x = x + dropout2(ffn(norm2(x))).

    Drop-in for ``torch.nn.TransformerEncoderLayer``: same arguments, same state_dict. Differences: evaluation equals
    training without dropout, also in padded positions; rows without visible keys never give NaN; nested tensors are
    refused; ``activation`` may also be "silu" or "gelu_tanh", and a mask a ``Mask``.

    Args:
        d_model: E, width of input and output, a multiple of nhead.
        nhead: number of heads.
        dim_feedforward: width inside the feed-forward block.
        dropout: probability of every dropout of the layer.
        activation: "relu" | "gelu" | "gelu_tanh" | "silu" or a callable; F.relu, F.gelu, nn.ReLU, nn.GELU and the like
            are fused, an unknown one is called.
        layer_norm_eps: eps of both norms.
        batch_first: (B, T, E) instead of (T, B, E).
        norm_first: norms before the sublayers instead of after them.
        bias: False leaves all biases out.
        device: of the parameters.
        dtype: of the parameters.
        backend: "reference" | "aten" | "cpu" | "triton" | "cuda", or None to choose automatically.

    Shape:
        src (T, B, E), (B, T, E) with batch_first, or (T, E) -> the same.

    Example:
        >>> TransformerEncoderLayer(8, 2, 32, batch_first=True)(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    backend: str | None = None

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = nn.functional.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        function = _checked("TransformerEncoderLayer", d_model, nhead, dim_feedforward, dropout, activation)
        nn.Module.__init__(self)
        factory: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        attention = {**factory, "dropout": dropout, "batch_first": batch_first, "backend": backend}
        norm = {**factory, "eps": layer_norm_eps, "backend": backend}
        self.self_attn = MultiheadAttention(d_model, nhead, **attention)
        self.linear1 = nn.Linear(d_model, dim_feedforward, **factory)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(dim_feedforward, d_model, **factory)
        self.norm_first = norm_first
        self.norm1, self.norm2 = LayerNorm(d_model, **norm), LayerNorm(d_model, **norm)
        self.dropout1, self.dropout2 = nn.Dropout(dropout), nn.Dropout(dropout)
        self.activation = function
        self.activation_relu_or_gelu = 0  # so torch.nn.TransformerEncoder never hands this layer nested tensors
        self.backend = backend

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | Mask | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Runs ``src`` through the layer; masks as in ``MultiheadAttention``."""
        _checked_input("TransformerEncoderLayer", "src", src, self.self_attn)
        x, own = src, _own_blocks(self, nn.TransformerEncoderLayer, "_sa_block", "_ff_block")
        if own and self.norm_first:
            x, (f, dropout, backend) = self._pre_norm(x, None, src_mask, src_key_padding_mask, is_causal)
            return add(f, x, dropout, backend)
        masks = (*self._masks(x, src_mask, src_key_padding_mask), is_causal)
        if own:
            return self._post_norm(x, *masks)
        if self.norm_first:
            x = x + self._sa_block(self.norm1(x), *masks)
            return x + self._ff_block(self.norm2(x))
        x = self.norm1(x + self._sa_block(x, *masks))
        return self.norm2(x + self._ff_block(x))

    def _pre_norm(
        self,
        x: Tensor,
        pending: Pending | None,
        mask: Any,
        key_padding_mask: Tensor | None,
        is_causal: bool,
        places: Tensor | None = None,
    ) -> tuple[Tensor, Pending]:
        """A norm_first layer whose first residual sum is still to be done, and whose last one is left to be done."""
        told = rows(mask)
        y, x = enter(x, pending, self.norm1, **told)
        masks = self._masks(x, mask, key_padding_mask)
        query, x = (y, x) if places is None else (at(y, places), at(x, places))
        y, x = add_norm(attend(self.self_attn, query, y, *masks, is_causal), x, self.dropout1, self.norm2, **told)
        return x, (self._feed_forward(y, **told), self.dropout2, self.backend)

    def _post_norm(
        self, x: Tensor, mask: Any, key_padding_mask: Any, is_causal: bool, places: Tensor | None = None
    ) -> Tensor:
        """A layer with its norms behind the sublayers."""
        query, told = x if places is None else at(x, places), rows(mask)
        attended = attend(self.self_attn, query, x, mask, key_padding_mask, is_causal)
        x = norm_of_sum(attended, query, self.dropout1, self.norm1, **told)
        return norm_of_sum(self._feed_forward(x, **told), x, self.dropout2, self.norm2, **told)

    def _answers_at(self) -> bool:
        """Whether a stack may ask for some ``places`` (B, C) alone: nobody could tell that the rest is not computed."""
        return plain(self.self_attn, MultiheadAttention) and self.self_attn.batch_first and self._works_by_rows()

    def _packs(self) -> bool:
        """Whether a stack may run on packed sequences: likewise."""
        return self._works_by_rows() and _packs(self, (self.self_attn,), (self.norm1, self.norm2))

    def _works_by_rows(self) -> bool:
        """Whether all in it but attention turns each row into one that depends on no other, and nobody watches."""
        own = _own_blocks(self, nn.TransformerEncoderLayer, "_sa_block", "_ff_block")
        return own and plain(self, TransformerEncoderLayer) and _by_rows_but_for(self, self.self_attn)

    def _masks(self, x: Tensor, mask: Any, key_padding_mask: Any) -> tuple[Any, Any]:
        """The masks for whoever computes the attention: code written for torch's layer expects them floating."""
        ours = isinstance(self.self_attn, MultiheadAttention)
        if ours and _own_blocks(self, nn.TransformerEncoderLayer, "_sa_block"):
            return mask, key_padding_mask
        return floating(mask, x), floating(key_padding_mask, x)

    def _chains(self) -> bool:
        """Whether a stack may call ``_pre_norm`` in place of the layer."""
        return (
            self.norm_first
            and plain(self, *CHAINED)
            and _own_blocks(self, nn.TransformerEncoderLayer, "_sa_block", "_ff_block")
        )

    def _feed_forward(self, x: Tensor, **options: Any) -> Tensor:
        return feed_forward(x, self.linear1, self.activation, self.dropout, self.linear2, self.backend, **options)


CHAINED.append(TransformerEncoderLayer)


class TransformerDecoderLayer(nn.TransformerDecoderLayer):
    """x = norm1(x + dropout1(self_attn(x))); x = norm2(x + dropout2(multihead_attn(x, memory))); x = norm3(x + ffn(x)).

    With norm_first: x = x + dropout1(self_attn(norm1(x))), and so on.

    Drop-in for ``torch.nn.TransformerDecoderLayer``: same arguments, same state_dict. Differences: as in
    ``TransformerEncoderLayer``.

    Args:
        d_model: E, width of input, memory and output, a multiple of nhead.
        nhead: number of heads.
        dim_feedforward: width inside the feed-forward block.
        dropout: probability of every dropout of the layer.
        activation: as in ``TransformerEncoderLayer``; but as in torch's own, every copy of the layer, and so a stack of
            it, has F.relu in place of an activation that is a module: give its name or its function.
        layer_norm_eps: eps of the three norms.
        batch_first: (B, T, E) instead of (T, B, E).
        norm_first: norms before the sublayers instead of after them.
        bias: False leaves all biases out.
        device: of the parameters.
        dtype: of the parameters.
        backend: "reference" | "aten" | "cpu" | "triton" | "cuda", or None to choose automatically.

    Shape:
        tgt (Tt, B, E), memory (Ts, B, E) -> (Tt, B, E); B first with batch_first; without B unbatched.

    Example:
        >>> layer = TransformerDecoderLayer(8, 2, 32, batch_first=True)
        >>> layer(torch.randn(2, 5, 8), torch.randn(2, 7, 8), tgt_is_causal=True).shape
        torch.Size([2, 5, 8])
    """

    backend: str | None = None

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = nn.functional.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        function = _checked("TransformerDecoderLayer", d_model, nhead, dim_feedforward, dropout, activation)
        nn.Module.__init__(self)
        factory: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        attention = {**factory, "dropout": dropout, "batch_first": batch_first, "backend": backend}
        norm = {**factory, "eps": layer_norm_eps, "backend": backend}
        self.self_attn = MultiheadAttention(d_model, nhead, **attention)
        self.multihead_attn = MultiheadAttention(d_model, nhead, **attention)
        self.linear1 = nn.Linear(d_model, dim_feedforward, **factory)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(dim_feedforward, d_model, **factory)
        self.norm_first = norm_first
        self.norm1, self.norm2, self.norm3 = (LayerNorm(d_model, **norm) for _ in range(3))
        self.dropout1, self.dropout2, self.dropout3 = (nn.Dropout(dropout) for _ in range(3))
        self.activation = function
        self.backend = backend

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | Mask | None = None,
        memory_mask: Tensor | Mask | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Runs ``tgt`` through the layer, which looks at ``memory``; masks as in ``MultiheadAttention``."""
        _checked_input("TransformerDecoderLayer", "tgt", tgt, self.self_attn)
        _checked_input("TransformerDecoderLayer", "memory", memory, self.multihead_attn)
        x = tgt
        own = (tgt_mask, tgt_key_padding_mask, tgt_is_causal)
        across = (memory_mask, memory_key_padding_mask, memory_is_causal)
        if not _own_blocks(self, nn.TransformerDecoderLayer, "_sa_block", "_mha_block", "_ff_block"):
            if self.norm_first:
                x = x + self._sa_block(self.norm1(x), *own)  # type: ignore[arg-type]
                x = x + self._mha_block(self.norm2(x), memory, *across)  # type: ignore[arg-type]
                return x + self._ff_block(self.norm3(x))
            x = self.norm1(x + self._sa_block(x, *own))  # type: ignore[arg-type]
            x = self.norm2(x + self._mha_block(x, memory, *across))  # type: ignore[arg-type]
            return self.norm3(x + self._ff_block(x))
        if self.norm_first:
            x, (f, dropout, backend) = self._pre_norm(x, None, memory, own, across)
            return add(f, x, dropout, backend)
        told = rows(tgt_mask)
        x = norm_of_sum(attend(self.self_attn, x, x, *own), x, self.dropout1, self.norm1, **told)
        x = norm_of_sum(attend(self.multihead_attn, x, memory, *across), x, self.dropout2, self.norm2, **told)
        return norm_of_sum(self._feed_forward(x, **told), x, self.dropout3, self.norm3, **told)

    def _pre_norm(
        self, x: Tensor, pending: Pending | None, memory: Tensor, own: tuple, across: tuple
    ) -> tuple[Tensor, Pending]:
        """A norm_first layer whose first residual sum is still to be done, and whose last one is left to be done."""
        told = rows(own[0])
        y, x = enter(x, pending, self.norm1, **told)
        y, x = add_norm(attend(self.self_attn, y, y, *own), x, self.dropout1, self.norm2, **told)
        y, x = add_norm(attend(self.multihead_attn, y, memory, *across), x, self.dropout2, self.norm3, **told)
        return x, (self._feed_forward(y, **told), self.dropout3, self.backend)

    def _packs(self) -> bool:
        """Whether a stack may run on packed sequences: as in ``TransformerEncoderLayer``."""
        own = _own_blocks(self, nn.TransformerDecoderLayer, "_sa_block", "_mha_block", "_ff_block")
        attentions = self.self_attn, self.multihead_attn
        whole = own and plain(self, TransformerDecoderLayer) and _by_rows_but_for(self, *attentions)
        return whole and _packs(self, attentions, (self.norm1, self.norm2, self.norm3))

    def _chains(self) -> bool:
        """Whether a stack may call ``_pre_norm`` in place of the layer."""
        return (
            self.norm_first
            and plain(self, TransformerDecoderLayer)
            and _own_blocks(self, nn.TransformerDecoderLayer, "_sa_block", "_mha_block", "_ff_block")
        )

    def _feed_forward(self, x: Tensor, **options: Any) -> Tensor:
        return feed_forward(x, self.linear1, self.activation, self.dropout, self.linear2, self.backend, **options)


def enter(x: Tensor, pending: Pending | None, norm: nn.Module, **options: Any) -> tuple[Tensor, Tensor]:
    """(norm(z), z) for z = x plus what is pending; ``options`` as in ``add_norm``."""
    if pending is None:
        return norm(x), x
    f, dropout, _ = pending
    return add_norm(f, x, dropout, norm, **options)


def _packs(layer: Any, attentions: Sequence[nn.Module], norms: Sequence[nn.Module]) -> bool:
    """Whether packed sequences give what padded ones give in a layer that works by rows but for its attentions."""
    return all(map(_attends_packed, attentions)) and _drops_as_padded(layer, *norms)


def _attends_packed(attention: Any) -> bool:
    """Whether an attention is the project's, unwatched, and adds no keys to those of its input."""
    whole = plain(attention, MultiheadAttention, Int8MultiheadAttention)
    return whole and attention.bias_k is None and not attention.add_zero_attn


def _by_rows_but_for(layer: Any, *attentions: nn.Module) -> bool:
    others = (module for module in layer.modules() if module is not layer and module not in attentions)
    return all(map(by_rows, others)) and activation_name(layer.activation) is not None


def _drops_as_padded(layer: Any, *norms: nn.Module) -> bool:
    """Whether its dropouts, where they drop anything, are those of fused blocks, which are told the padded rows."""
    if not drops(layer):
        return True
    return all(plain(norm, *NORMS) for norm in norms) and plain_linear(layer.linear1) and plain_linear(layer.linear2)


def drops(module: nn.Module) -> bool:
    """Whether a dropout in it drops anything."""
    return any(dropout_p(inner) for inner in module.modules() if isinstance(inner, nn.Dropout))


def by_rows(module: nn.Module) -> bool:
    """Whether ``module`` is known to turn each row into one that depends on no other, and nobody watches it."""
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and len(module.normalized_shape) > 1:
        return False
    return plain(module, *LINEARS, *_BY_ROWS) or activation_name(module) is not None


def at(x: Tensor, places: Tensor) -> Tensor:
    """(B, C, E), the positions ``places`` (B, C) of ``x`` (B, T, E)."""
    return x.gather(1, places.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def attend(
    attention: nn.Module, x: Tensor, memory: Tensor, mask: Any, key_padding_mask: Tensor | None, is_causal: bool
) -> Tensor:
    """The attention sublayer without its dropout."""
    masks: Any = {"attn_mask": mask, "key_padding_mask": key_padding_mask, "is_causal": is_causal}
    return attention(x, memory, memory, need_weights=False, **masks)[0]


def floating(mask: Any, x: Tensor) -> Any:
    """A bool mask, True = ignore, as torch's encoder hands it on, 0 or -inf in the input's dtype; others as given."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=x.dtype).masked_fill(mask, -torch.inf)


def _own_blocks(layer: nn.Module, parent: type, *names: str) -> bool:
    """Whether nobody has overridden the block methods that torch's layers are made of."""
    return all(getattr(type(layer), name) is getattr(parent, name) and name not in layer.__dict__ for name in names)


def _checked(op: str, d_model: int, nhead: int, dim_feedforward: int, dropout: float, activation: Any) -> Any:
    _arguments.heads(op, "d_model", d_model, "nhead", nhead)
    _arguments.size(op, "dim_feedforward", dim_feedforward)
    _check.probability(op, "dropout", dropout)
    return activation_function(op, activation)


def _checked_input(op: str, name: str, x: Tensor, attention: nn.Module) -> None:
    width = getattr(attention, "embed_dim", None)
    if isinstance(x, Tensor) and x.is_nested:
        raise ValueError(f"{op}: {name} must be a padded tensor with a key padding mask, got a nested tensor")
    _check.tensor(op, name, x)
    if x.dim() not in (2, 3):
        raise ValueError(f"{op}: {name} must be batched, 3-D, or unbatched, 2-D, got shape {tuple(x.shape)}")
    if width is not None:
        _arguments.features(op, name, x, width, "d_model")
