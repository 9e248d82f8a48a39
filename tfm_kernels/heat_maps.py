"""Attention maps as pictures. matplotlib is imported only where a picture is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAME = "write_heat_maps"
_PANEL = 2.6  # inches, a side of one head's map without its labels
_LABELS = 0.9  # inches, the room for labels


def write_heat_maps(
    path: str | Path,
    maps: Mapping[str, Tensor],
    *,
    row: int = 0,
    query_labels: Sequence[str] | None = None,
    key_labels: Sequence[str] | None = None,
    head_names: Sequence[int] | None = None,
    dpi: int = 100,
) -> None:
    """Draw attention maps into a PNG file: a line of panels for each layer, a panel for each head.

    One layer and one head give one large panel. Every panel has its own scale from 0 to its largest weight.

    Args:
        path: the file, replaced where it exists.
        maps: {name: (B, heads, Tq, Tk)}, as ``get_attention_maps`` returns it; all of one size Tq x Tk, such as the
            encoder's, the decoder's or the cross-attention's.
        row: which of the B texts to draw.
        query_labels: the Tq tokens that look, from top to bottom; None numbers them.
        key_labels: the Tk tokens that are looked at, from left to right; None numbers them.
        head_names: the numbers of the heads, where ``maps`` holds a choice of them.
        dpi: pixels per inch; a panel is 2.6 inches wide and high, and 0.9 inches are added for labels.

    Raises:
        ImportError: matplotlib is not installed (the message says how to install it).
        TypeError, ValueError: maps are no maps, differ in size or number of heads, or labels do not fit them.

    Example:
        >>> model = tfk.nn.TransformerEncoder(tfk.nn.TransformerEncoderLayer(8, 2, 32, batch_first=True), 2)
        >>> maps, words = tfk.get_attention_maps(model, torch.randn(1, 3, 8)), ["to", "be", "or"]
        >>> write_heat_maps("heads.png", maps, query_labels=words, key_labels=words)
    """
    figure = heat_maps_figure(
        maps, row=row, query_labels=query_labels, key_labels=key_labels, head_names=head_names, dpi=dpi
    )
    figure.savefig(path, format="png", dpi=dpi)


def heat_maps_figure(
    maps: Mapping[str, Tensor],
    *,
    row: int = 0,
    query_labels: Sequence[str] | None = None,
    key_labels: Sequence[str] | None = None,
    head_names: Sequence[int] | None = None,
    dpi: int = 100,
) -> Figure:
    """The figure that ``write_heat_maps`` writes."""
    heads, queries, keys = _checked(maps, row)
    rows = _labels("query_labels", query_labels, queries)
    columns = _labels("key_labels", key_labels, keys)
    numbers = list(range(heads)) if head_names is None else list(head_names)
    if len(numbers) != heads:
        raise ValueError(f"{_NAME}: head_names must name the {heads} heads of maps, got {len(numbers)} names")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"{_NAME}: needs matplotlib, which is not installed: pip install 'tfm_kernels[plot]'"
        ) from error
    side = _PANEL * 2 if len(maps) == heads == 1 else _PANEL
    size = (heads * side + _LABELS * (heads + 1), len(maps) * (side + _LABELS) + _LABELS)
    figure: Any = Figure(figsize=size, dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(maps), heads, squeeze=False)
    for line, (name, tensor) in zip(axes, maps.items(), strict=True):
        for panel, number, weights in zip(line, numbers, tensor[row].detach().float().cpu(), strict=True):
            panel.imshow(weights.numpy(), cmap="viridis", vmin=0.0, aspect="auto", interpolation="nearest")
            panel.set_title(f"{name}, head {number}", fontsize=7)
            panel.set_xticks(range(keys), columns, rotation=90, fontsize=6)
            panel.set_yticks(range(queries), rows, fontsize=6)
            panel.set_xlabel("key", fontsize=6)
            panel.set_ylabel("query", fontsize=6)
    return figure


def _checked(maps: Any, row: int) -> tuple[int, int, int]:
    """(heads, Tq, Tk) that all maps have."""
    if not isinstance(maps, Mapping) or not all(isinstance(t, Tensor) and t.dim() == 4 for t in maps.values()):
        raise TypeError(f"{_NAME}: maps must be a dict of (B, heads, Tq, Tk) tensors, as get_attention_maps returns it")
    if not maps:
        raise ValueError(f"{_NAME}: maps must hold at least one map, got none")
    sizes = {name: tuple(t.shape) for name, t in maps.items()}
    first = next(iter(sizes.values()))
    for name, size in sizes.items():
        if size != first:
            raise ValueError(f"{_NAME}: maps must all have one shape, got {first} and {size} for {name}")
    if 0 in first:
        raise ValueError(f"{_NAME}: maps must not be empty, got shape {first}")
    if isinstance(row, bool) or not isinstance(row, int) or not 0 <= row < first[0]:
        raise ValueError(f"{_NAME}: row must be one of the {first[0]} rows of maps, counted from 0, got {row!r}")
    return first[1], first[2], first[3]


def _labels(name: str, given: Sequence[str] | None, count: int) -> list[str]:
    labels = [str(i) for i in range(count)] if given is None else [str(label) for label in given]
    if len(labels) != count:
        raise ValueError(f"{_NAME}: {name} must hold {count} labels, one for each position of maps, got {len(labels)}")
    return [label.replace("$", r"\$") for label in labels]  # or matplotlib would read formulas
