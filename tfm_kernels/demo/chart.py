"""The demo's bar chart."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from .timing import Timing


def draw(timings: list[Timing], path: Path) -> bool:
    """Writes a PNG: two bars a batch, original and patched. False, and no file, where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for shift, name, colour in ((-0.2, "stock", "#9aa5b1"), (0.2, "patched", "#1f6f8b")):
        heights = [getattr(timing, name) * 1e3 for timing in timings]
        label = "Hugging Face, SDPA" if name == "stock" else "patched by tfm_kernels"
        axes.bar([at + shift for at in range(len(timings))], heights, 0.4, label=label, color=colour)
    for at, timing in enumerate(timings):
        axes.text(at + 0.2, timing.patched * 1e3, f"{timing.speedup:.2f}x", ha="center", va="bottom")
    axes.set_xticks(range(len(timings)), [timing.label for timing in timings])
    axes.set_ylabel("milliseconds a batch (median)")
    axes.set_title("all-MiniLM-L6-v2, inference")
    axes.legend()
    figure.savefig(path, dpi=120)
    return True
