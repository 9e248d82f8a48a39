"""TransformerEncoder, TransformerDecoder and Transformer, drop-in for torch.nn's.

They subclass torch.nn's for isinstance's sake. Padded batches stay padded: there is no conversion to nested tensors, so
the output has the same shape and the same values in training without dropout and in evaluation. In a norm_first stack
of our layers the last residual sum of a layer is fused with the first norm of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import _check
from ..mask import Mask
from . import _arguments
from ._bypass import plain
from .attention import causal_hint
from .layer_norm import NORMS, LayerNorm, add, norm_of_sum
from .packed import Packed, rows
from .transformer_layer import Pending, TransformerDecoderLayer, TransformerEncoderLayer, at, by_rows, drops, floating


class TransformerEncoder(nn.TransformerEncoder):
    """x = norm(layer_n(... layer_1(x))), the layers being copies of one.

    Drop-in for ``torch.nn.TransformerEncoder``: same arguments, same state_dict. Differences: no nested tensors,
    whatever ``enable_nested_tensor`` says, so padded positions hold the same values in training and evaluation.

    Args:
        encoder_layer: copied ``num_layers`` times; any module with the signature of a TransformerEncoderLayer.
        num_layers: how many layers.
        norm: applied at the end, or None.
        enable_nested_tensor: accepted and kept, without effect.
        mask_check: accepted and kept, without effect.
        backend: if not None, the backend of every layer and norm inside.

    Shape:
        src (T, B, E), (B, T, E) or (T, E), as the layers take it -> the same.

    Example:
        >>> layer = tfk.nn.TransformerEncoderLayer(8, 2, 32, batch_first=True)
        >>> TransformerEncoder(layer, 2, tfk.nn.LayerNorm(8))(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        encoder_layer: nn.Module,
        num_layers: int,
        norm: nn.Module | None = None,
        enable_nested_tensor: bool = True,
        mask_check: bool = True,
        *,
        backend: str | None = None,
    ) -> None:
        _checked_stack("TransformerEncoder", "encoder_layer", encoder_layer, num_layers, norm, backend)
        super().__init__(encoder_layer, num_layers, norm, False, mask_check)  # type: ignore[arg-type]
        self.enable_nested_tensor = enable_nested_tensor
        _name_backend(self, backend)

    def forward(
        self,
        src: Tensor,
        mask: Tensor | Mask | Packed | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """Runs ``src`` through the layers.

        Args:
            src: the input.
            mask: (T, T) or (B * H, T, T): bool, True = ignore, or floating, added to the scores; or a ``Mask``; or a
                ``Packed``, where ``takes_packed()``, and ``src`` its tokens (1, total, E).
            src_key_padding_mask: (B, T): bool, True = ignore, or floating.
            is_causal: whether ``mask`` is the causal one; None looks whether it is, except under compilation.

        Returns:
            As ``src``.
        """
        hint = not isinstance(mask, Packed) and causal_hint(mask, is_causal)
        x, pending = _encoded(self.layers, src, mask, src_key_padding_mask, hint)
        return _finished(x, pending, self.norm, **rows(mask))

    def takes_packed(self) -> bool:
        """Whether ``forward`` may be given packed tokens, with their ``Packed`` as mask: nobody could tell.

        So it is where every layer is the project's, and all in it works row by row but attention, unwatched.
        """
        return _takes_packed(self, TransformerEncoder, TransformerEncoderLayer)

    def forward_at(
        self, src: Tensor, places: Tensor, mask: Tensor | Mask | None = None, packed: Packed | None = None
    ) -> Tensor:
        """What ``forward`` gives at some places: the last layer computes no queries and no feed-forward for the others.

        Where it has modules other than torch.nn's and the project's, which might mix rows, or that carry hooks, or the
        mask is not the same for every query, all is computed and the places are picked.

        Args:
            src: (B, T, E); the layers are batch_first.
            places: (B, C), int64, positions in [0, T).
            mask: as in ``forward``.
            packed: the same as the packing of ``src``, where ``takes_packed()``, for all layers but the last.

        Returns:
            (B, C, E).

        Raises:
            ValueError: places has another shape or dtype.
        """
        _check.tensor("TransformerEncoder", "places", places)
        if places.dim() != 2 or len(places) != len(src) or places.dtype != torch.int64:
            raise ValueError(
                f"TransformerEncoder: places must be int64 of shape ({len(src)}, C) to match src {tuple(src.shape)}, "
                f"got {_check.dtype_name(places)} of shape {tuple(places.shape)}"
            )
        layers: list[nn.Module] = list(self.layers)
        last = layers.pop() if layers else None
        unseen = plain(self, TransformerEncoder) and (self.norm is None or by_rows(self.norm)) and _hides_keys(mask)
        if not (unseen and isinstance(last, TransformerEncoderLayer) and last._answers_at()):
            return at(self(src, mask=mask), places)
        if packed is None or not layers:
            x, pending = _encoded(layers, src, mask, None, False)
        else:
            x, pending = _encoded(layers, packed.pack(src), packed, None, False)
            x, pending = packed.unpack(_settled(x, pending, **rows(packed))), None
        if last.norm_first:
            x, pending = last._pre_norm(x, pending, mask, None, False, places)
        else:
            x, pending = last._post_norm(_settled(x, pending), mask, None, False, places), None
        return _finished(x, pending, self.norm)


class TransformerDecoder(nn.TransformerDecoder):
    """x = norm(layer_n(... layer_1(x, memory) ..., memory)), the layers being copies of one.

    Drop-in for ``torch.nn.TransformerDecoder``: same arguments, same state_dict. Differences: bad arguments raise
    ValueError or TypeError, and so does a negative ``num_layers``, which torch takes.

    Args:
        decoder_layer: copied ``num_layers`` times; any module with the signature of a TransformerDecoderLayer.
        num_layers: how many layers.
        norm: applied at the end, or None.
        backend: if not None, the backend of every layer and norm inside.

    Shape:
        tgt (Tt, B, E), memory (Ts, B, E) -> (Tt, B, E); B first or without B as the layers take it.

    Example:
        >>> layer = tfk.nn.TransformerDecoderLayer(8, 2, 32, batch_first=True)
        >>> TransformerDecoder(layer, 2)(torch.randn(2, 5, 8), torch.randn(2, 7, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        decoder_layer: nn.Module,
        num_layers: int,
        norm: nn.Module | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        _checked_stack("TransformerDecoder", "decoder_layer", decoder_layer, num_layers, norm, backend)
        super().__init__(decoder_layer, num_layers, norm)  # type: ignore[arg-type]
        _name_backend(self, backend)

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | Mask | Packed | None = None,
        memory_mask: Tensor | Mask | Packed | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Runs ``tgt`` through the layers, each of which looks at ``memory``; masks as in ``TransformerEncoder``."""
        hint = not isinstance(tgt_mask, Packed) and causal_hint(tgt_mask, tgt_is_causal)
        own = (tgt_mask, tgt_key_padding_mask, hint)
        across = (memory_mask, memory_key_padding_mask, memory_is_causal)
        x, pending = tgt, None
        for layer in self.layers:
            if isinstance(layer, TransformerDecoderLayer) and layer._chains():
                x, pending = layer._pre_norm(x, pending, memory, own, across)
                continue
            x, pending = _settled(x, pending), None
            x = layer(
                x,
                memory,
                tgt_mask=tgt_mask,
                memory_mask=memory_mask,
                tgt_key_padding_mask=tgt_key_padding_mask,
                memory_key_padding_mask=memory_key_padding_mask,
                tgt_is_causal=hint,
                memory_is_causal=memory_is_causal,
            )
        return _finished(x, pending, self.norm, **rows(tgt_mask))

    def takes_packed(self) -> bool:
        """Whether ``forward`` may be given packed tokens, and packed ones as ``memory``, as in ``TransformerEncoder``.

        Their ``Packed`` come as ``tgt_mask`` and, with ``keys``, as ``memory_mask``.
        """
        return _takes_packed(self, TransformerDecoder, TransformerDecoderLayer)


class Transformer(nn.Transformer):
    """decoder(tgt, encoder(src)): the encoder-decoder model of Vaswani et al. 2017 without embeddings and output layer.

    Drop-in for ``torch.nn.Transformer``: same arguments, same state_dict, same final norms in both orders. Differences:
    those of its parts; ValueError where torch raises RuntimeError.

    Args:
        d_model: E, width of both inputs and of the output.
        nhead: number of heads.
        num_encoder_layers: how many encoder layers.
        num_decoder_layers: how many decoder layers.
        dim_feedforward: width inside the feed-forward blocks.
        dropout: probability of every dropout.
        activation: as in ``TransformerEncoderLayer``.
        custom_encoder: a module to use as encoder.
        custom_decoder: a module to use as decoder.
        layer_norm_eps: eps of the norms.
        batch_first: (B, T, E) instead of (T, B, E).
        norm_first: norms before the sublayers instead of after them.
        bias: False leaves all biases out.
        device: of the parameters.
        dtype: of the parameters.
        backend: "reference" | "aten" | "cpu" | "triton" | "cuda", or None to choose automatically.

    Shape:
        src (Ts, B, E), tgt (Tt, B, E) -> (Tt, B, E); B first with batch_first; without B unbatched.

    Example:
        >>> model = Transformer(8, 2, 1, 1, 32, batch_first=True)
        >>> model(torch.randn(2, 7, 8), torch.randn(2, 5, 8), tgt_is_causal=True).shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        custom_encoder: Any | None = None,
        custom_decoder: Any | None = None,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        _arguments.heads("Transformer", "d_model", d_model, "nhead", nhead)
        _arguments.backend("Transformer", backend)
        layer = (d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias)
        factory: dict[str, Any] = {"device": device, "dtype": dtype, "backend": backend}
        if custom_encoder is None:
            encoder_layer = TransformerEncoderLayer(*layer, **factory)
            norm = LayerNorm(d_model, layer_norm_eps, bias=bias, **factory)
            custom_encoder = TransformerEncoder(encoder_layer, num_encoder_layers, norm)
        if custom_decoder is None:
            decoder_layer = TransformerDecoderLayer(*layer, **factory)
            norm = LayerNorm(d_model, layer_norm_eps, bias=bias, **factory)
            custom_decoder = TransformerDecoder(decoder_layer, num_decoder_layers, norm)
        super().__init__(
            d_model, nhead, custom_encoder=custom_encoder, custom_decoder=custom_decoder, batch_first=batch_first
        )

    def forward(
        self,
        src: Tensor,
        tgt: Tensor,
        src_mask: Tensor | Mask | None = None,
        tgt_mask: Tensor | Mask | None = None,
        memory_mask: Tensor | Mask | None = None,
        src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        src_is_causal: bool | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Encodes ``src`` and decodes ``tgt`` on it; masks as in ``TransformerEncoder``."""
        for name, x in (("src", src), ("tgt", tgt)):
            _arguments.features("Transformer", name, x, self.d_model, "d_model")
        axis = 0 if self.batch_first else 1
        if src.dim() != tgt.dim() or (src.dim() == 3 and src.shape[axis] != tgt.shape[axis]):
            raise ValueError(
                f"Transformer: src and tgt must have one batch size, got shapes {tuple(src.shape)} and "
                f"{tuple(tgt.shape)} with batch_first={self.batch_first}"
            )
        memory = self._encode(src, src_mask, src_key_padding_mask, src_is_causal, memory_key_padding_mask)
        return self.decoder(
            tgt,
            memory,
            tgt_mask=tgt_mask,
            memory_mask=memory_mask,
            tgt_key_padding_mask=tgt_key_padding_mask,
            memory_key_padding_mask=memory_key_padding_mask,
            tgt_is_causal=tgt_is_causal,
            memory_is_causal=memory_is_causal,
        )

    def _encode(
        self, src: Tensor, mask: Any, key_padding_mask: Any, is_causal: bool | None, memory_key_padding_mask: Any
    ) -> Tensor:
        """The memory, of which the decoder will not see what ``memory_key_padding_mask`` hides."""
        return self.encoder(src, mask=mask, src_key_padding_mask=key_padding_mask, is_causal=is_causal)


def _takes_packed(stack: Any, cls: type, layer_cls: Any) -> bool:
    if not plain(stack, cls) or not all(isinstance(layer, layer_cls) and layer._packs() for layer in stack.layers):
        return False
    if stack.norm is None or not by_rows(stack.norm):
        return stack.norm is None
    return plain(stack.norm, *NORMS) or not drops(stack)  # a fused one takes the last sum, and is told the padded rows


def _encoded(layers: Iterable[nn.Module], src: Tensor, *masks: Any) -> tuple[Tensor, Pending | None]:
    """``src`` behind encoder layers, and what is left to be added to it; masks are mask, padding, whether causal."""
    mask, key_padding_mask, hint = masks
    x, pending = src, None
    for layer in layers:
        nested = isinstance(x, Tensor) and x.is_nested
        if isinstance(layer, TransformerEncoderLayer) and layer._chains() and not nested:
            x, pending = layer._pre_norm(x, pending, mask, key_padding_mask, hint)
            continue
        x, pending = _settled(x, pending), None
        given = mask, key_padding_mask
        if not isinstance(layer, TransformerEncoderLayer):
            given = floating(mask, src), floating(key_padding_mask, src)
        x = layer(x, src_mask=given[0], src_key_padding_mask=given[1], is_causal=hint)
    return x, pending


def _settled(x: Tensor, pending: Pending | None, **options: Any) -> Tensor:
    """``x`` with the residual sum done that was left to be done; ``options`` as in ``add_norm``."""
    return x if pending is None else add(pending[0], x, *pending[1:], **options)


def _hides_keys(mask: Any) -> bool:
    """Whether a mask hides the same keys from every query."""
    if not isinstance(mask, Mask):
        return mask is None
    return not mask.has_band() and (mask.keep_matrix is None or mask.keep_matrix.shape[-2] == 1)


def _finished(x: Tensor, pending: Pending | None, norm: nn.Module | None, **options: Any) -> Tensor:
    if pending is None:
        return x if norm is None else norm(x)
    if norm is None:
        return _settled(x, pending, **options)
    return norm_of_sum(pending[0], x, pending[1], norm, **options)


def _checked_stack(op: str, name: str, layer: Any, num_layers: int, norm: Any, backend: str | None) -> None:
    if not isinstance(layer, nn.Module):
        raise TypeError(f"{op}: {name} must be a module, got {type(layer).__name__}")
    _arguments.size(op, "num_layers", num_layers, 0)
    if norm is not None and not isinstance(norm, nn.Module):
        raise TypeError(f"{op}: norm must be a module or None, got {type(norm).__name__}")
    _arguments.backend(op, backend)


def _name_backend(stack: nn.Module, backend: str | None) -> None:
    if backend is not None:
        for module in stack.modules():
            if hasattr(module, "backend"):
                setattr(module, "backend", backend)  # noqa: B010  (mypy knows no such attribute)
