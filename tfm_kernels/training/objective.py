"""What training minimises, as one module, so that DDP and FSDP2 see its forward as they see any other."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .. import _check
from ..models import MaskedLanguageModel, TranslationTransformer
from ..models.language import LanguageModel
from ..nn import TransformerEncoder
from ..nn._bypass import plain, plain_linear
from ..nn.loss import of_linear
from .loss import IGNORED, cross_entropy

# what these give is output(features(*inputs)), and nothing else
_OUTPUT_OF_FEATURES = (LanguageModel.forward, TranslationTransformer.forward)


class Objective(nn.Module):
    """The loss of a model's logits, without computing them where no target is and without keeping them.

    Of a language or translation model from ``tfm_kernels.models`` only the features are computed everywhere; those of
    counted targets go through ops.linear_cross_entropy with the output layer's parameters. Of a masked model the last
    layer, too, is computed for them alone, where they are few. A model of another class,
    or with a forward of its own, hooks, or an output layer that is no plain nn.Linear, is called and gives logits.

    Args:
        model: gives logits (..., V) from an example's inputs; held as ``model``, not copied.
        smoothing: of the labels, as in ``cross_entropy``.
        backend: of ops.linear_cross_entropy: "reference" | "aten" | "cpu", or None to choose automatically.

    Example:
        >>> model = tfk.models.CausalLanguageModel(tfk.models.CausalLanguageConfig(100, 2, d_model=16, nhead=2))
        >>> ids = torch.randint(1, 100, (2, 8))
        >>> Objective(model)((ids[:, :-1],), ids[:, 1:]).shape
        torch.Size([])
    """

    def __init__(self, model: nn.Module, *, smoothing: float = 0.0, backend: str | None = None) -> None:
        super().__init__()
        self.model: Any = model
        self.smoothing = smoothing
        self.backend = backend

    def forward(self, inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        """The sum of the loss over counted targets.

        Args:
            inputs: of the model, on its device.
            targets: (...), int64, classes or IGNORED. In host memory no device waits for them.

        Returns:
            A scalar, float32 or float64; 0 where every target is IGNORED, and then every parameter's gradient is 0.

        Raises:
            ValueError: targets have another shape than the logits without V, or, on a CPU, one is no class.
        """
        if not self._skips_logits():
            return cross_entropy(*self.scores(inputs, targets), smoothing=self.smoothing)
        features, targets = self._counted(inputs, targets)
        options: dict[str, Any] = {"label_smoothing": self.smoothing, "backend": self.backend}
        return of_linear(self.model.output, features, targets, reduction="sum", ignore_index=IGNORED, **options)

    def scores(self, inputs: tuple[Tensor, ...], targets: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and the targets they are for: all, or where it saves work the counted ones alone.

        Args:
            inputs: as in ``forward``.
            targets: as in ``forward``.

        Returns:
            (logits (..., V), targets (...)), on the model's device.
        """
        if not self._skips_logits():
            logits = self.model(*inputs)
            return logits, targets.to(logits.device)
        features, targets = self._counted(inputs, targets)
        return self.model.output(features), targets

    def _skips_logits(self) -> bool:
        """Whether nobody could tell that the model is not called as a whole."""
        kind = type(self.model)
        return kind.forward in _OUTPUT_OF_FEATURES and plain(self.model, kind) and plain_linear(self.model.output)

    def _answers_at(self) -> bool:
        """Whether the model has ``features_at``, and it gives what ``features`` gives."""
        model = self.model
        ours = isinstance(model, MaskedLanguageModel) and isinstance(model.encoder, TransformerEncoder)
        return ours and type(model).features is MaskedLanguageModel.features

    def _counted(self, inputs: tuple[Tensor, ...], targets: Tensor) -> tuple[Tensor, Tensor]:
        """(features (N, E), targets (N,)) of the N counted targets."""
        features, targets = self._features(inputs, targets)
        features, targets = features.flatten(0, -2), targets.flatten()
        places = (targets != IGNORED).nonzero().squeeze(1)
        if len(places) < len(targets):
            targets = targets[places]
            features = features.index_select(0, places.to(features.device))
        return features, targets.to(features.device)

    def _features(self, inputs: tuple[Tensor, ...], targets: Tensor) -> tuple[Tensor, Tensor]:
        """Features (..., E) and the targets (...) at these places: all, or of a masked model few with all counted."""
        if self._answers_at() and targets.dim() == 2 and targets.numel() and targets.shape == inputs[0].shape:
            wanted = targets != IGNORED
            most = int(wanted.sum(1).max())  # the rest of a row with fewer is IGNORED
            if 0 < most <= targets.shape[1] // 2:
                places = wanted.int().argsort(dim=1, descending=True, stable=True)[:, :most]
                features = self.model.features_at(*inputs, places.to(inputs[0].device))
                return features, targets.gather(1, places)
        features = self.model.features(*inputs)
        _check.shape("Objective", "targets", targets, features.shape[:-1], "the model's features", features)
        return features, targets
