"""Runs ninja, for tests that build a library of their own; it compiles again only what changed."""

import subprocess
import sys


def build(folder, graph, made):
    """folder / made, built by a graph that is written there; asserts that it could be."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "build.ninja").write_text(graph)
    done = subprocess.run([sys.executable, "-m", "ninja", "-C", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / made
