"""What training minimises, as one module, so that DDP and FSDP2 see its forward as they see any other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from .. import _check
from ..models import MaskedLanguageModel, TranslationTransformer
from ..models.language import LanguageModel
from ..nn import TransformerEncoder
from ..nn._bypass import plain, plain_linear
from ..nn.loss import of_linear
from ..patching import huggingface_logits
from .loss import IGNORED, cross_entropy

# what these give is output(features(*inputs)), and nothing else
_OUTPUT_OF_FEATURES = (LanguageModel.forward, TranslationTransformer.forward)
Inputs = tuple[Any, ...] | Mapping[str, Any]


class Objective(nn.Module):
    """The loss of a model's logits, without computing them where no target is and without keeping them.

    Of a language or translation model from ``tfm_kernels.models`` only the features are computed everywhere; those of
    counted targets go through ops.linear_cross_entropy with the output layer's parameters. Of a masked model the last
    layer, too, is computed for them alone, where they are few. So it is with models of transformers for causal and for
    masked language modelling, patched or not: Llama, Mistral, Qwen, SmolLM3, Gemma, Phi, Granite, GPT-2, GPT-NeoX and
    others like them, BERT, RoBERTa, DistilBERT, MPNet, ModernBERT, ALBERT and ELECTRA. A model of another class, or
    with a forward of its own, hooks, or an output layer that is no plain nn.Linear, is called and gives logits. (A
    model of peft's is of another class; with adapters beside its layers, its ``get_base_model()`` is not.)

    Args:
        model: gives logits (..., V), or what has them as ``logits``, from an example's inputs; held as ``model``, not
            copied.
        smoothing: of the labels, as in ``cross_entropy``.
        backend: of ops.linear_cross_entropy: "reference" | "aten" | "cpu", or None to choose automatically.

    Example:
        >>> model = tfk.models.CausalLanguageModel(tfk.models.CausalLanguageConfig(100, 2, d_model=16, nhead=2))
        >>> ids = torch.randint(1, 100, (2, 8))
        >>> Objective(model)((ids[:, :-1],), ids[:, 1:]).shape
        torch.Size([])

    With a model of transformers, whose labels lie one token behind (divide by how many targets are counted):

        objective({"input_ids": ids[:, :-1], "attention_mask": mask[:, :-1]}, labels[:, 1:])
    """

    def __init__(self, model: nn.Module, *, smoothing: float = 0.0, backend: str | None = None) -> None:
        super().__init__()
        self.model: Any = model
        self.smoothing = smoothing
        self.backend = backend

    def forward(self, inputs: Inputs, targets: Tensor) -> Tensor:
        """The sum of the loss over counted targets.

        Args:
            inputs: of the model, on its device, in its order or by name; no labels.
            targets: (...), int64, classes or IGNORED. In host memory no device waits for them.

        Returns:
            A scalar, float32 or float64; 0 where every target is IGNORED, and then every parameter's gradient is 0.

        Raises:
            ValueError: targets have another shape than the logits without V, or, on a CPU, one is no class; inputs
                hold labels.
        """
        split = self._split()
        if split is None:
            return cross_entropy(*self.scores(inputs, targets), smoothing=self.smoothing)
        features, targets = self._counted(split, inputs, targets)
        options: dict[str, Any] = {"label_smoothing": self.smoothing, "backend": self.backend}
        return of_linear(split.output, features, targets, reduction="sum", ignore_index=IGNORED, **options)

    def scores(self, inputs: Inputs, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and the targets they are for: all, or where it saves work the counted ones alone.

        Args:
            inputs: as in ``forward``.
            targets: as in ``forward``.

        Returns:
            (logits (..., V), targets (...)), on the model's device.
        """
        split = self._split()
        if split is None:
            found = _call(self.model, inputs)
            logits = found if isinstance(found, Tensor) else found.logits
            return logits, targets.to(logits.device)
        features, targets = self._counted(split, inputs, targets)
        return split.output(features), targets

    def _split(self) -> _Own | huggingface_logits.Split | None:
        """The model's features and output layer, where nobody could tell that it is not called as a whole."""
        kind = type(self.model)
        if kind.forward in _OUTPUT_OF_FEATURES:
            return _Own(self.model.output) if plain(self.model, kind) and plain_linear(self.model.output) else None
        return huggingface_logits.split(self.model)

    def _answers_at(self) -> bool:
        """Whether the model has ``features_at``, and it gives what ``features`` gives."""
        model = self.model
        ours = isinstance(model, MaskedLanguageModel) and isinstance(model.encoder, TransformerEncoder)
        return ours and type(model).features is MaskedLanguageModel.features

    def _counted(self, split: Any, inputs: Inputs, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(what the output layer takes (N, E), targets (N,)) of the N counted targets."""
        features, targets = self._features(split, inputs, targets)
        _check.shape("Objective", "targets", targets, features.shape[:-1], "the model's features", features)
        features, targets = features.flatten(0, -2), targets.flatten()
        places = (targets != IGNORED).nonzero().squeeze(1)
        if len(places) < len(targets):
            targets = targets[places]
            features = features.index_select(0, places.to(features.device))
        return split.before(features), targets.to(features.device)

    def _features(self, split: Any, inputs: Inputs, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Features (..., E) and the targets (...) at these places: all, or of a masked model few with all counted."""
        if isinstance(split, huggingface_logits.Split):
            return split.features(inputs, targets), targets
        ids = inputs[0] if isinstance(inputs, tuple) else None
        if (
            ids is not None
            and self._answers_at()
            and targets.dim() == 2
            and targets.numel()
            and targets.shape == ids.shape
        ):
            wanted = targets != IGNORED
            most = int(wanted.sum(1).max())  # the rest of a row with fewer is IGNORED
            if 0 < most <= targets.shape[1] // 2:
                places = wanted.int().argsort(dim=1, descending=True, stable=True)[:, :most]
                features = self.model.features_at(*inputs, places.to(ids.device))
                return features, targets.gather(1, places)
        return _call(self.model.features, inputs), targets


class _Own(NamedTuple):
    """The parts of a model of ours."""

    output: nn.Linear

    def before(self, rows: Tensor) -> Tensor:
        """The output layer takes the features as they are."""
        return rows


def _call(function: Callable[..., Any], inputs: Inputs) -> Any:
    return function(*inputs) if isinstance(inputs, tuple) else function(**inputs)
