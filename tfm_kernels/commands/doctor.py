"""``doctor``: what is here and what is missing."""

from __future__ import annotations

import argparse
from typing import Any

from ..diagnosis import doctor
from . import parser


def add(commands: Any) -> None:
    """Declares the command."""
    parser.add(commands, "doctor", _run, "say what is built, what is missing, and how to mend it", "doctor")


def _run(options: argparse.Namespace) -> int:
    print(doctor())
    return 0
