"""DeBERTa-v2 and v3: BERT's layers with disentangled attention (deberta_attention.py), and the model.

The model always asks its encoder for what each layer gives, and takes the last of it; so it is the model, who knows
what it was asked for itself, that runs padded batches packed.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.packed import Packed
from . import huggingface
from .bert_output import INTERMEDIATE, OUTPUT, add_norm, feed_forward, inside
from .deberta_attention import Places, self_attention
from .huggingface_packed import WHAT, by_name, packing, why_not_call
from .known import Known
from .linear import linear
from .registry import Recipe, register_recipe
from .swap import fell_back, options

# fingerprints of transformers 5.24 (source.py)
_LAYER = Known(
    {
        "forward": "22b482119300",
        "attention.forward": "e19af346c626",
        "attention.self.forward": "705105ab4d67",
        "attention.self.disentangled_attention_bias": "3720e6ac2905",
        "attention.self.transpose_for_scores": "dd8d8eba2d86",
        "attention.output.forward": OUTPUT,
        "intermediate.forward": INTERMEDIATE,
        "output.forward": OUTPUT,
    },
    {
        "attention.self.query_proj": nn.Linear,
        "attention.self.key_proj": nn.Linear,
        "attention.self.value_proj": nn.Linear,
        "attention.self.dropout": nn.Dropout,
        "attention.output.dense": nn.Linear,
        "attention.output.LayerNorm": nn.LayerNorm,
        "attention.output.dropout": nn.Dropout,
        "intermediate.dense": nn.Linear,
        "output.dense": nn.Linear,
        "output.LayerNorm": nn.LayerNorm,
        "output.dropout": nn.Dropout,
    },
    ("attention", "attention.self", "attention.output", "intermediate", "output"),
    "intermediate.intermediate_act_fn",
)
_MODEL = Known(
    {
        "forward": "3c48ec3c6260",
        "encoder.forward": "13febacf3266",
        "encoder.get_rel_embedding": "fc2246d04115",
        "encoder.get_rel_pos": "4ca2663e87dd",
    },
    {},
    ("encoder",),
    calls=("embeddings", "encoder.layer"),
)


def _why_not(layer: Any, mask: Any, query_states: Any, places: Any, asked: Any) -> str | None:
    reason = _LAYER.why_not(layer)
    if reason is not None:
        return reason
    if asked:
        return "output_attentions was asked for"
    if query_states is not None:
        return "it was called with query_states"
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return "its mask has not four axes"
    if layer.attention.self.relative_attention and (places is None or places.dim() != 3 or len(places) > 1):
        return "it was not called with one relative_pos for all rows"
    return None


def _fuse_layer(original: Any) -> type:
    class Fused(original):
        def forward(
            self,
            hidden_states: Tensor,
            attention_mask: Any,
            query_states: Tensor | None = None,
            relative_pos: Any = None,
            rel_embeddings: Tensor | None = None,
            output_attentions: bool = False,
        ) -> tuple[Tensor, None]:
            if not isinstance(attention_mask, Packed):  # the model that packed has asked already
                if fell_back(self, _why_not(self, attention_mask, query_states, relative_pos, output_attentions)):
                    told = (query_states, relative_pos, rel_embeddings, output_attentions)
                    return super().forward(hidden_states, attention_mask, *told)
                relative_pos = Places(relative_pos) if self.attention.self.relative_attention else None
            return _layer(self, hidden_states, attention_mask, relative_pos, rel_embeddings), None

    return Fused


def _layer(self: Any, x: Tensor, mask: Any, places: Places | None, table: Tensor | None) -> Tensor:
    """x = LN(x + dropout(out(attention(x)))); x = LN(x + dropout(ffn(x)))."""
    output, backend = self.attention.output, options(self).backend
    rows = mask.index if isinstance(mask, Packed) else None
    context = self_attention(self.attention.self, x, mask, places, table, backend)
    return feed_forward(self, add_norm(output, linear(context, output.dense), x, rows, backend), rows, backend)


# --- the model --------------------------------------------------------------------------------------------------------


def _recognise_model(module: nn.Module) -> bool | str:
    encoder = module._modules.get("encoder")
    if encoder is None or not isinstance(encoder._modules.get("layer"), nn.ModuleList):
        return False
    if not all(_LAYER.recognise(layer) for layer in encoder.layer):  # type: ignore[union-attr]
        return False
    known = _MODEL.recognise(module)
    return _why_not_model(module) or True if known is True else known


def _why_not_model(model: Any) -> str | None:
    """None where nothing but attention looks at other tokens, and the encoder is as it was."""
    reason = _MODEL.why_not(model)
    if reason is None and model.encoder.conv is not None:
        reason = "its encoder has a convolution over neighbouring positions"
    return reason or ("its last layer runs z_steps times" if model.z_steps > 1 else None)


def _fuse_model(original: Any) -> type:
    names = list(inspect.signature(original.forward).parameters)[1:]

    class Fused(original):
        @functools.wraps(original.forward)
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            told = by_name(names, args, kwargs)
            packed = _packing(self, told)
            if packed is None:
                return super().forward(*args, **kwargs)
            given = {name: told.get(name) for name in ("input_ids", "token_type_ids", "position_ids", "inputs_embeds")}
            if given["token_type_ids"] is None:
                given["token_type_ids"] = torch.zeros_like(told["attention_mask"], dtype=torch.long)
            x = self.embeddings(**given, mask=told["attention_mask"])
            y = packed.unpack(_encoder(self.encoder, x, packed))
            return huggingface.file_of(self).BaseModelOutput(last_hidden_state=y)

    return Fused


def _packing(model: Any, told: dict[str, Any]) -> Packed | None:
    if told.get("input_ids") is not None and told.get("inputs_embeds") is not None:
        return None  # which its own code refuses

    def why_not(layer: Any) -> str | None:
        return _LAYER.why_not(layer)

    return packing(model, told, model.encoder.layer, why_not, lambda m: why_not_call(m, told) or _why_not_model(m))


def _encoder(encoder: Any, x: Tensor, packed: Packed) -> Tensor:
    """(1, total, E) for the padded (B, T, E): where tokens stand is found once for all layers."""
    table = encoder.get_rel_embedding()
    places = Places(encoder.get_rel_pos(x)) if encoder.relative_attention else None
    y = packed.pack(x)
    for layer in encoder.layer:
        y, _ = layer(y, packed, relative_pos=places, rel_embeddings=table)
    return y


def _projections(layer: Any) -> list[nn.Module]:
    attention = layer.attention.self
    return [attention.query_proj, attention.key_proj, attention.value_proj, layer.attention.output.dense]


register_recipe(Recipe("deberta.model", _recognise_model, _fuse_model, WHAT, packs=True, whole=True), first=False)
register_recipe(
    Recipe(
        "deberta.layer", _LAYER.recognise, _fuse_layer,
        "projections, attention, sum and LayerNorm, feed-forward, sum and LayerNorm", inside(_LAYER),
        projects=_projections,
    )
)  # fmt: skip
