"""MPNet, whose layers are BERT's with a bias by distance, and whose attention knows no registry.

Its encoder makes that bias once for each row of a batch; the fused one once for all, and runs padded batches packed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..nn.packed import Packed
from . import block, guard, huggingface
from .bert_output import INTERMEDIATE, OUTPUT, add_norm, feed_forward
from .huggingface_mask import as_data
from .known import Known
from .linear import linear
from .registry import Recipe, register_recipe
from .source import says
from .swap import fell_back, options

# fingerprints of transformers 5.24 (source.py)
ENCODER, POSITION_BIAS = "58d1a3cf0ae5", "9a20eff3a111"

_LAYER = Known(
    {
        "forward": "342d0ec63275",
        "attention.forward": "d7e734e83191",
        "attention.attn.forward": "b15800006144",
        "intermediate.forward": INTERMEDIATE,
        "output.forward": OUTPUT,
    },
    {
        **dict.fromkeys([f"attention.attn.{name}" for name in "qkvo"], nn.Linear),
        "attention.attn.dropout": nn.Dropout,
        "attention.LayerNorm": nn.LayerNorm,
        "attention.dropout": nn.Dropout,
        "intermediate.dense": nn.Linear,
        "output.dense": nn.Linear,
        "output.LayerNorm": nn.LayerNorm,
        "output.dropout": nn.Dropout,
    },
    ("attention", "attention.attn", "intermediate", "output"),
    "intermediate.intermediate_act_fn",
)


def _why_not(layer: Any, asked: Any) -> str | None:
    return "output_attentions was asked for" if asked else _LAYER.why_not(layer)


def _fuse_layer(original: Any) -> type:
    class Fused(original):
        def forward(
            self,
            hidden_states: Tensor,
            attention_mask: Any = None,
            position_bias: Tensor | None = None,
            output_attentions: bool = False,
            **kwargs: Any,
        ) -> tuple[Tensor]:
            if not isinstance(attention_mask, Packed):  # the encoder that packed has asked already
                if fell_back(self, _why_not(self, output_attentions)):
                    return super().forward(hidden_states, attention_mask, position_bias, output_attentions, **kwargs)
                attention_mask = as_data(attention_mask)
            return (_layer(self, hidden_states, attention_mask, position_bias),)

    return Fused


def _layer(self: Any, x: Tensor, mask: Any, bias: Tensor | None) -> Tensor:
    """x = LN(x + dropout(out(attention(x)))); x = LN(x + dropout(ffn(x)))."""
    attention, backend = self.attention.attn, options(self).backend
    rows = mask.index if isinstance(mask, Packed) else None
    context = block.self_attention(
        x,
        (attention.q, attention.k, attention.v),
        attention.num_attention_heads,
        mask,
        bias=bias,
        scale=attention.attention_head_size**-0.5,
        dropout_p=block.dropout_p(attention.dropout),
        backend=backend,
    )
    return feed_forward(self, add_norm(self.attention, linear(context, attention.o), x, rows, backend), rows, backend)


def _recognise_encoder(module: nn.Module) -> bool | str:
    children = {"layer": nn.ModuleList, "relative_attention_bias": nn.Embedding}
    if not all(isinstance(module._modules.get(name), cls) for name, cls in children.items()):
        return False
    if not all(_LAYER.recognise(layer) for layer in module.layer):  # type: ignore[union-attr]
        return False
    known = says(module, "forward", ENCODER) and says(module, "compute_position_bias", POSITION_BIAS)
    return known or guard.UNKNOWN_FORWARD


def _fuse_encoder(original: Any) -> type:
    class Fused(original):
        def forward(
            self,
            hidden_states: Tensor,
            attention_mask: Any = None,
            output_attentions: bool = False,
            output_hidden_states: bool = False,
            return_dict: bool = False,
            **kwargs: Any,
        ) -> Any:
            def why_not(layer: nn.Module) -> str | None:
                return _why_not(layer, output_attentions)

            def why_not_stack(stack: nn.Module) -> str | None:
                return "output_hidden_states was asked for" if output_hidden_states else None

            packed = huggingface.packing(
                self, as_data(attention_mask), hidden_states, self.layer, why_not, why_not_stack, behind=True
            )
            if packed is None:
                told = (output_attentions, output_hidden_states, return_dict)
                return super().forward(hidden_states, attention_mask, *told, **kwargs)
            bias, y = self.compute_position_bias(hidden_states), packed.pack(hidden_states)
            for layer in self.layer:
                (y,) = layer(y, packed, bias)
            y = packed.unpack(y)
            return huggingface.file_of(self).BaseModelOutput(last_hidden_state=y) if return_dict else (y,)

        def compute_position_bias(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            """(1, H, T, T), which all rows share; with positions of their own (B, H, T, T)."""
            return super().compute_position_bias(x if args or kwargs else x[:1], *args, **kwargs)

    return Fused


def _children(layer: Any) -> list[nn.Module]:
    """What a fused layer runs, but for its output, which has a recipe of its own."""
    return [inner for inner in _LAYER.covers(layer) if inner is not layer.output]


def _projections(layer: Any) -> list[nn.Module]:
    attention = layer.attention.attn
    return [attention.q, attention.k, attention.v, attention.o]


register_recipe(
    Recipe(
        "mpnet.encoder", _recognise_encoder, _fuse_encoder, "padded batches run packed; padded positions give 0",
        packs=True,
    ),
    first=False,
)  # fmt: skip
register_recipe(
    Recipe(
        "mpnet.layer", _LAYER.recognise, _fuse_layer,
        "projections, attention, sum and LayerNorm, feed-forward, sum and LayerNorm", _children, projects=_projections,
    )
)  # fmt: skip
