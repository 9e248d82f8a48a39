"""Models of transformers whose logits are one linear layer of what they compute, token by token, from their features.

Who wants a few logits, or none, takes features and layer apart; ``training.Objective`` does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from .._transformers import is_model
from ..nn._bypass import plain, plain_linear
from . import guard, packed
from .huggingface_heads import count_padding
from .huggingface_packed import is_row_by_row
from .source import says

_NOT_FOR_FEATURES = ("labels", "shift_labels", "logits_to_keep")
Step = str | Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True)
class _Head:
    """Where a model keeps what, all names dotted."""

    base: str
    output: str
    before: tuple[Step, ...] = ()  # from features to the output layer's input: modules row by row, or functions
    through: Mapping[str, str] = field(default_factory=dict)  # modules that only call the others -> their code
    unless: Callable[[Any], object] = lambda config: False  # whether more is done with the logits


_BERT = {"cls": "6fb78ea60208", "cls.predictions": "6e962889d19e", "cls.predictions.transform": "d26209141e47"}
_DENSE = ("lm_head.dense", lambda model, rows: F.gelu(rows), "lm_head.layer_norm")
_LIKE_ROBERTA = {"lm_head": "7c0332c5276c"}
# fingerprint of a model's forward, of transformers 5.24 -> its head
_HEADS = {
    "5431154a3f56": _Head("model", "lm_head"),  # Llama and most decoders
    "d9f35c42bd23": _Head("model", "lm_head"),  # DeepSeek V3 and other mixtures without a loss of their own
    "bf8852260dc4": _Head("model", "lm_head"),  # Nemotron
    "24721a113a6f": _Head("model", "lm_head"),  # StableLM
    "6b5627411a9b": _Head(
        "model", "lm_head", unless=lambda config: config.final_logit_softcapping is not None
    ),  # Gemma
    "259211ef4e83": _Head(
        "model",
        "lm_head",
        (lambda model, rows: rows / model.config.logits_scaling,),  # type: ignore[union-attr, operator]
    ),  # Granite
    "93e26e4f1600": _Head("transformer", "lm_head"),  # GPT-2
    "1525cdff3ab3": _Head("gpt_neox", "lm_head"),
    "4d45a182c412": _Head("model.decoder", "lm_head"),  # OPT
    "a300779405d0": _Head("model", "lm_head"),  # EuroBERT
    "aa7f33af2d4d": _Head(
        "bert",
        "cls.predictions.decoder",
        tuple(f"cls.predictions.transform.{name}" for name in ("dense", "transform_act_fn", "LayerNorm")),
        _BERT,
    ),
    "23535c7179e0": _Head("roberta", "lm_head.decoder", _DENSE, _LIKE_ROBERTA),  # and XLM-R, CamemBERT
    "0df0e0984d37": _Head("mpnet", "lm_head.decoder", _DENSE, _LIKE_ROBERTA),
    "e7ba0ae43577": _Head("distilbert", "vocab_projector", ("vocab_transform", "activation", "vocab_layer_norm")),
    "262a5dfab715": _Head(
        "model", "decoder", ("head.dense", "head.act", "head.norm"), {"head": "f965fc04ae73"}
    ),  # ModernBERT
    "620fbc6c6b02": _Head(
        "albert",
        "predictions.decoder",
        ("predictions.dense", "predictions.activation", "predictions.LayerNorm"),
        {"predictions": "1d4932d37920"},
    ),
    "6cfe0d867b18": _Head(
        "electra",
        "generator_lm_head",
        tuple(f"generator_predictions.{name}" for name in ("dense", "activation", "LayerNorm")),
        {"generator_predictions": "128eb8aa5eee"},
    ),
}


@dataclass(frozen=True)
class Split:
    """A model's features and its output layer apart: logits are output(before(features))."""

    model: Any
    head: _Head

    @property
    def output(self) -> nn.Linear:
        """Whose weight (V, E) and bias (V,) may be read."""
        found = guard.child(self.model, self.head.output)
        assert isinstance(found, nn.Linear)
        return found

    def features(self, inputs: tuple[Any, ...] | Mapping[str, Any], targets: Tensor) -> Tensor:
        """Of a call (..., E).

        Args:
            inputs: the model's own, in their order or by name.
            targets: where one counts padding, the model runs padded, or there would be zeros.
        """
        signature = inspect.signature(self.model.forward)
        told: dict[str, Any] = {} if isinstance(inputs, tuple) else dict(inputs)
        if isinstance(inputs, tuple):
            told = dict(signature.bind(*inputs).arguments)
        for name in _NOT_FOR_FEATURES:
            if told.pop(name, None) is not None:
                raise ValueError(
                    f"{name} is not taken: the targets are given by themselves, and say which logits count"
                )
        if "use_cache" in signature.parameters:
            told.setdefault("use_cache", False)  # nobody would see it
        base = guard.child(self.model, self.head.base)
        if count_padding({"attention_mask": told.get("attention_mask"), "labels": targets}, shifts=False):
            with packed.padded("targets count padding, which -100 would leave out"):
                return base(**told)[0]
        return base(**told)[0]

    def before(self, rows: Tensor) -> Tensor:
        """What the output layer takes (N, E) from rows of the features."""
        for step in self.head.before:
            rows = guard.child(self.model, step)(rows) if isinstance(step, str) else step(self.model, rows)
        return rows


def split(model: Any) -> Split | None:
    """The model's features and output layer, where nobody could tell that it is not called as a whole, else None."""
    if not is_model(model) or not plain(model, type(model)):
        return None
    head = next((head for known, head in _HEADS.items() if says(model, "forward", known)), None)
    if head is None or head.unless(model.config):
        return None
    for path, code in head.through.items():
        module = guard.child(model, path)
        if not says(module, "forward", code) or not guard.is_plain(module):
            return None
    for step in head.before:
        if isinstance(step, str) and not _takes_rows(guard.child(model, step)):
            return None
    output = guard.child(model, head.output)
    return Split(model, head) if plain_linear(output) else None


def _takes_rows(module: Any) -> bool:
    return isinstance(module, nn.Module) and is_row_by_row(module) and not guard.hooked(module)
