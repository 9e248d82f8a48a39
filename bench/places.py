"""Where the checkout keeps what is measured in it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
QUICK_RESULTS = ROOT / ".benchmarks" / "quick"  # not for the repository
