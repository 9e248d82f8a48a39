"""TranslationTransformer: the encoder-decoder of Vaswani et al. 2017, from token numbers to scores of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..mask import Mask
from ..nn import _arguments
from .config import StackConfig
from .embedding import InputEmbedding
from .padding import Padding, check_ids, padding
from .stack import decoded, encoded, encoder_decoder
from .token_model import TokenModel

_NAME = "TranslationTransformer"


@dataclass(frozen=True)
class TranslationConfig(StackConfig):
    """The sizes of a ``TranslationTransformer``; the other fields are those of ``StackConfig``.

    Attributes:
        source_vocab: Vs, how many source tokens there are.
        target_vocab: Vt, how many target tokens there are. With share_embeddings both are one vocabulary.
        num_encoder_layers: how many encoder layers.
        num_decoder_layers: how many decoder layers.
    """

    source_vocab: int
    target_vocab: int
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6

    def __init__(
        self,
        source_vocab: int,
        target_vocab: int,
        d_model: int = StackConfig.d_model,
        nhead: int = StackConfig.nhead,
        num_encoder_layers: int = num_encoder_layers,
        num_decoder_layers: int = num_decoder_layers,
        dim_feedforward: int = StackConfig.dim_feedforward,
        dropout: float = StackConfig.dropout,
        activation: str = StackConfig.activation,
        norm_first: bool = StackConfig.norm_first,
        max_length: int = StackConfig.max_length,
        share_embeddings: bool = StackConfig.share_embeddings,
        pad_id: int | None = StackConfig.pad_id,
        *,
        final_norm: bool | None = StackConfig.final_norm,
        layer_norm_eps: float = StackConfig.layer_norm_eps,
        bias: bool = StackConfig.bias,
        positions: str = StackConfig.positions,
    ) -> None:
        own = {
            "source_vocab": source_vocab,
            "target_vocab": target_vocab,
            "num_encoder_layers": num_encoder_layers,
            "num_decoder_layers": num_decoder_layers,
        }
        for name, value in own.items():
            object.__setattr__(self, name, value)  # as a frozen dataclass sets its fields
        super().__init__(
            d_model=d_model, nhead=nhead, dim_feedforward=dim_feedforward, dropout=dropout, activation=activation,
            norm_first=norm_first, final_norm=final_norm, layer_norm_eps=layer_norm_eps, bias=bias, positions=positions,
            max_length=max_length, share_embeddings=share_embeddings, pad_id=pad_id,
        )  # fmt: skip

    def __post_init__(self) -> None:
        """Refuses what no model can be built from."""
        super().__post_init__()
        self.check_vocabulary("source_vocab")
        self.check_vocabulary("target_vocab")
        _arguments.size("TranslationConfig", "num_encoder_layers", self.num_encoder_layers)
        _arguments.size("TranslationConfig", "num_decoder_layers", self.num_decoder_layers)
        if self.share_embeddings and self.source_vocab != self.target_vocab:
            raise ValueError(
                "TranslationConfig: share_embeddings needs one vocabulary for source and target, got source_vocab "
                f"{self.source_vocab} and target_vocab {self.target_vocab}"
            )


class TranslationTransformer(TokenModel):
    """Scores of every next target token, given a source sentence and the target tokens before it.

    The decoder sees target positions up to its own and all source tokens. Padding, wherever it stands, changes
    nothing at any token. Matrices start by Xavier's rule, embeddings as N(0, 1 / E), the output bias as 0.

    ``transformer`` is a ``tfm_kernels.nn.Transformer``: with ``final_norm=True`` its state_dict is that of
    ``torch.nn.Transformer``, both ways and strict. ``share_embeddings`` makes one matrix of source embedding, target
    embedding and output.

    Args:
        config: the sizes.
        device: of the parameters.
        dtype: of the parameters.
        backend: "reference" | "aten" | "cpu" | "triton" | "cuda", or None to choose automatically.

    Shape, with B sentences of Ts source and Tt target tokens:

        ====================  =================  ==============
        step                  source             target
        ====================  =================  ==============
        token numbers         (B, Ts)            (B, Tt)
        embedding, positions  (B, Ts, E)         (B, Tt, E)
        one head's q, k, v    (B, H, Ts, E / H)  (B, H, Tt, E / H)
        attention in a layer  (B, Ts, E)         (B, Tt, E)
        cross-attention                          (B, Tt, E)
        feed-forward inside   (B, Ts, F)         (B, Tt, F)
        stack                 (B, Ts, E)         (B, Tt, E)
        output                                   (B, Tt, Vt)
        ====================  =================  ==============

    Raises:
        TypeError, ValueError: ids are no (B, T) integers in the vocabulary, or longer than max_length.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3; Xiong et al. 2020, arXiv:2002.04745, for pre-LN.

    Example:
        >>> model = TranslationTransformer(tfk.models.TranslationConfig(100, 120, d_model=16, nhead=2))
        >>> model(torch.randint(1, 100, (2, 7)), torch.randint(1, 120, (2, 5))).shape
        torch.Size([2, 5, 120])
    """

    config: TranslationConfig

    def __init__(
        self,
        config: TranslationConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(config)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.source_embedding = InputEmbedding(config.source_vocab, config, **factory)
        shared = self.source_embedding.tokens if config.share_embeddings else None
        self.embedding = InputEmbedding(config.target_vocab, config, shared, **factory)
        layers = config.num_encoder_layers, config.num_decoder_layers
        self.transformer = encoder_decoder(config, *layers, backend=backend, **factory)
        self._make_output(config.target_vocab, **factory)

    def forward(self, source_ids: Tensor, target_ids: Tensor) -> Tensor:
        """Scores (logits) of the token after each target position.

        Args:
            source_ids: (B, Ts) int64 or int32.
            target_ids: (B, Tt), the target as it is known so far, usually with a start token in front.

        Returns:
            (B, Tt, Vt).
        """
        return self.output(self.features(source_ids, target_ids))

    def features(self, source_ids: Tensor, target_ids: Tensor) -> Tensor:
        """What ``output`` turns into scores: (B, Tt, E), 0 behind the last token."""
        check_ids(_NAME, "source_ids", source_ids, self.config.source_vocab, self.config.max_length)
        if isinstance(target_ids, Tensor) and target_ids.shape[:1] != source_ids.shape[:1]:
            raise ValueError(
                f"{_NAME}: target_ids must have the batch size {source_ids.shape[0]} of source_ids, got shape "
                f"{tuple(target_ids.shape)}"
            )
        memory, found = self.encode(source_ids)
        return self.decode(target_ids, memory, found.mask)

    def encode(self, source_ids: Tensor) -> tuple[Tensor, Padding]:
        """(memory (B, Ts, E), 0 behind the last token; the padding of the source)."""
        check_ids(_NAME, "source_ids", source_ids, self.config.source_vocab, self.config.max_length)
        found = padding(source_ids, self.config.pad_id)
        x = self.source_embedding(source_ids, found.positions)
        return encoded(self.transformer.encoder, x, found), found

    def decode(self, target_ids: Tensor, memory: Tensor, memory_mask: Mask | None) -> Tensor:
        """The decoder's features (B, Tt, E) of ``target_ids``, 0 behind the last, given what ``encode`` returned."""
        check_ids(_NAME, "target_ids", target_ids, self.config.target_vocab, self.config.max_length)
        found = padding(target_ids, self.config.pad_id)
        x = self.embedding(target_ids, found.positions)
        return decoded(self.transformer.decoder, x, found, memory, memory_mask)
