"""Decoder-only models of transformers packed as a whole: Llama, Mistral, Qwen, SmolLM3, Gemma, OLMo, Granite ...

Batches with padding behind or in front, as for embeddings, training and the prompts of ``generate``; and sequences that
lie behind one another in rows, told apart by their positions, as collators without padding give them. Their layers are
fused by llama.py and its neighbours; models with experts, or with both branches side by side, run as they did.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from ..mask import Mask
from ..nn.packed import Packed
from .huggingface_mask import as_prepared
from .huggingface_packed import register_model
from .known import Known

# fingerprints of transformers 5.24 (source.py)
_ROTARY = ("fdf4680dfba6", "4f7632eb5673", "aa5f8d996efa", "d6679696f0a1")  # Llama's, Ernie 4.5's, by kind of layer
_MODEL = (
    "32d0a2f1795c",  # Llama, Arcee, Apertus, BitNet, Ernie 4.5, GLM, Helium, Hunyuan, OLMo, Seed
    "6f5defaf7a14",  # Mistral, Ministral 3, Phi 3
    "87d19f8fef93",  # Qwen 2 and 3, SmolLM3
    "80fd5692570f",  # Gemma
    "dc3909e1b534",  # Gemma 3
    "981f8c69c9d9",  # Granite
    "64fd35d9c5d0",  # OLMo 3
    "c6468f97440c",  # EXAONE 4
    "a5c896d3920b",  # Ministral
)
_TABLES = (
    nn.Embedding,
    "transformers.models.gemma.modeling_gemma.GemmaTextScaledWordEmbedding",
    "transformers.models.gemma3.modeling_gemma3.Gemma3TextScaledWordEmbedding",
)
_DECODER = Known(
    {"forward": _MODEL, "rotary_emb.forward": _ROTARY}, {"embed_tokens": _TABLES}, ("rotary_emb",), calls=("norm",),
    shares=True,
)  # fmt: skip


def _masks(model: Any, packed: Packed) -> Any:
    """The model makes its masks of it, but where it sees both ways, as EmbeddingGemma does."""
    if not getattr(model.config, "use_bidirectional_attention", False):
        return as_prepared(packed)
    far = model.config.sliding_window - 1
    return {"full_attention": packed, "sliding_attention": replace(packed, sight=Mask.window(far, far))}


register_model("decoder.model", _DECODER, _masks, attention="self_attn", norm="norm", causal=True)
