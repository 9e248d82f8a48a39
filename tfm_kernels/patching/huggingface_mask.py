"""Hugging Face transformers: the mask of a forward, as data for the families that only hand it on.

All others, and masks that have no form as data (packed sequences, image tokens, chunks ...), get transformers' dense
bool tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F

from ..mask import Band, Mask
from ..nn.packed import Packed
from . import guard
from .packed import NotPacked

# Families whose code hands the mask on unread, by config.model_type; tried with transformers 5.23 and 5.24
# (bert-generation, codegen, data2vec-audio, data2vec-text, ernie, eurobert, gptj, gte, hubert, jina_embeddings_v3,
# modernbert, nomic_bert, roc_bert, sew, unispeech, unispeech-sat and wav2vec2 with 5.24).
MASK_AS_DATA = frozenset(
    "albert apertus arcee bart bert bert-generation bitnet camembert clip_text_model codegen cohere cohere2 "
    "data2vec-audio data2vec-text deepseek_v3 distilbert electra ernie ernie4_5 eurobert exaone4 gemma "
    "gemma3_text glm glm4 gpt2 gpt_bigcode gpt_neox gptj granite granitemoe gte helium hubert hunyuan_v1_dense "
    "jina_embeddings_v3 llama marian ministral ministral3 mistral mixtral modernbert nemotron nomic_bert olmo "
    "olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe roberta roc_bert seed_oss "
    "sew smollm3 stablelm starcoder2 t5 unispeech unispeech-sat vit wav2vec2 whisper xlm-roberta".split()
)


@dataclass(frozen=True, eq=False)
class Prepared(Mask):
    """A Mask that passes for a mask of four axes where transformers asks whether one was prepared.

    So does ``generate`` with a static cache, and a model of images and text around a language model: they make the mask
    and give it to the model in the place of a padding mask, which then must not make it again.

    Attributes:
        shape: what the dense mask would have: (B, 1, Tq, Tk).
        asked: what transformers asked for it with, so that its own mask can be made; not in a compiled graph.
    """

    shape: tuple[int, ...] = ()
    asked: dict[str, Any] | None = None

    @property
    def ndim(self) -> int:
        """4."""
        return len(self.shape)

    def contiguous(self) -> Prepared:
        """Itself."""
        return self


class PreparedPacked(Packed):
    """A Packed that passes for a mask of four axes, as ``Prepared`` does."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(1, 1, total, total)."""
        return (1, 1, self.index.shape[0], self.index.shape[0])

    @property
    def ndim(self) -> int:
        """4."""
        return 4

    def __getitem__(self, key: object) -> NoReturn:
        """None has numbers."""
        raise NotPacked("its model reads its mask")

    def __getattr__(self, name: str) -> NoReturn:
        """None has what else a tensor has."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotPacked("its model reads its mask")


def as_prepared(packed: Packed) -> PreparedPacked:
    """``packed``, for a model that would make a mask of a padding mask."""
    return PreparedPacked(**{field.name: getattr(packed, field.name) for field in fields(packed)})


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Any = None,
    **kwargs: Any,
) -> Any:
    """The mask of one forward, as transformers asks for it: a Mask, None for no mask, or a dense bool tensor."""
    # of the file, as torch 2.11 traces no import from transformers itself, which is lazy
    from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

    if isinstance(attention_mask, Mask):
        return attention_mask
    if isinstance(attention_mask, Packed):
        return replace(attention_mask, sight=_sight(mask_function, kwargs.get("local_size"), kwargs))
    asked = {
        "batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset,
        "kv_offset": kv_offset, "mask_function": mask_function, "attention_mask": attention_mask, **kwargs,
    }  # fmt: skip
    config, local = kwargs.get("config"), kwargs.get("local_size")
    plain = (
        getattr(config, "model_type", None) in MASK_AS_DATA
        and isinstance(q_offset, int)
        and not kwargs.get("use_vmap", False)
    )
    if plain and mask_function is bidirectional_mask_function:
        if kwargs.get("allow_is_bidirectional_skip", False) and kv_offset == 0 and local is None:
            if attention_mask is None or attention_mask.shape[1] >= kv_length:
                keep = _keep(attention_mask, kv_length, 0, kv_length)
                return None if keep is None else Mask(keep_matrix=keep)
    elif plain and local is not None and kwargs.get("allow_is_bidirectional_skip", False):
        # which transformers asks for with a local size where a token sees so many on both sides, and nothing was added
        if (q_offset, kv_offset) == (0, 0) and (attention_mask is None or attention_mask.shape[1] >= kv_length):
            keep = _keep(attention_mask, kv_length, 0, kv_length)
            around = Band(-local, local) if local < max(q_length, kv_length) - 1 else Band()
            return None if keep is None and around == Band() else Mask(around, keep_matrix=keep)
    elif plain and kwargs.get("allow_is_causal_skip", True) and _is_causal(mask_function, local, config):
        offset = q_offset - kv_offset
        keep = _keep(attention_mask, kv_length, kv_offset, min(offset + q_length, kv_length))
        shape = (batch_size, 1, q_length, kv_length)
        told = None if torch.compiler.is_compiling() else asked
        return Prepared(*_band(q_length, kv_length, offset, local), keep_matrix=keep, shape=shape, asked=told)
    return sdpa_mask(**asked)


def _sight(mask_function: Any, local: int | None, asked: dict[str, Any]) -> Mask | None:
    """What a token of a packed batch sees of its sequence under the mask that its model makes for a kind of layers."""
    if "allow_is_bidirectional_skip" in asked:
        return None if local is None else Mask.window(local, local)
    if not _is_causal(mask_function, local, asked.get("config")):
        raise NotPacked("its model made a mask that is neither causal nor a window")
    return Mask.causal() if local is None else Mask.window(local - 1, 0)


def _is_causal(mask_function: Any, local: int | None, config: Any) -> bool:
    """Whether a mask that transformers would leave to is_causal, where nothing is hidden, is causal or a window.

    A window's function is made for each call and says nothing; that it may be left out tells that nothing was added to
    it, and only a window and chunks have a local size.
    """
    from transformers.masking_utils import causal_mask_function

    if local is None:
        return mask_function is causal_mask_function
    return local == getattr(config, "sliding_window", None) and getattr(config, "attention_chunk_size", None) is None


def _band(queries: int, keys: int, offset: int, window: int | None) -> tuple[Band, Band]:
    """Top-left and bottom-right band of a causal mask whose query i stands at key i + offset.

    The bottom-right one wherever the last query stands at the last key: it is the same for every length.
    """
    windowed = window is not None and keys > window
    last = offset == keys - queries
    here = 0 if last else offset
    low = {"low": here - window + 1} if windowed else {}  # type: ignore[operator]
    high = {} if last and queries == 1 else {"high": here}
    band = Band(**low, **high)
    return (Band(), band) if last else (band, Band())


def _keep(attention_mask: Tensor | None, keys: int, offset: int, seen: int) -> Tensor | None:
    """(B, 1, 1, Tk) of the keys from ``offset`` on; None where the first ``seen``, which count, are all kept.

    A padding mask that ends before the keys hides those behind it, as the room in a static cache.
    """
    if attention_mask is None:
        return None
    keep = attention_mask[:, offset : offset + keys]
    if keep.shape[1] >= seen and not guard.tracing(keep) and bool(keep.all()):
        return None
    room = keys - keep.shape[1]
    return (F.pad(keep, (0, room)) if room > 0 else keep)[:, None, None, :]


def _may_be_read(attention_mask: Tensor) -> bool:
    return attention_mask.device.type == "cpu" and not guard.tracing(attention_mask)


def hides_a_row(mask: Any) -> bool:
    """Whether what ``as_data`` gave of a mask that is added to the scores is seen to hide all keys of some row."""
    if not isinstance(mask, Tensor) or not _may_be_read(mask):
        return False
    return bool((mask <= torch.finfo(mask.dtype).min).all(-1).any())


def as_data(attention_mask: Any) -> Any:
    """A dense mask of transformers as data, where looking at it tells that it is that; otherwise itself.

    For families whose attention knows no registry: their models write masks out, once for all layers.

    Args:
        attention_mask: (B or 1, 1, Tq, Tk), floating, added to the scores, or bool, True where hidden; None.

    Returns:
        None where nothing is hidden; a Mask, causal where it is; the tensor where it says more than what is hidden,
        where it hides all keys of a row, as padding in front does, which a softmax then weighs alike and a Mask leaves
        out, or where its data must not be looked at.

    Cost: some passes over the mask, a head's share of attention's scores. CPU alone: elsewhere it would wait.
    """
    if attention_mask is None or not _may_be_read(attention_mask):
        return attention_mask
    if attention_mask.dtype == torch.bool:
        keep = ~attention_mask
    else:
        keep, hide = attention_mask == 0, attention_mask <= torch.finfo(attention_mask.dtype).min
        if not torch.equal(keep, ~hide):
            return attention_mask
    if not bool(keep.any(-1).all()):
        return attention_mask
    last, (queries, keys) = keep[..., -1:, :], keep.shape[-2:]
    columns = None if bool(last.all()) else last
    if queries > 1 and torch.equal(keep, torch.ones_like(keep[:1, :1]).tril(keys - queries) & last):
        return Mask(bottom_right=Band(high=0), keep_matrix=columns)
    if torch.equal(keep, last.expand_as(keep)):
        return None if columns is None else Mask(keep_matrix=columns)
    return Mask(keep_matrix=keep)
