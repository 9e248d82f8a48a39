"""Runs ninja, for tests that build a library of their own; it compiles again only what changed."""

import fcntl
import subprocess
import sys


def build(folder, graph, *made):
    """folder / made[0], built by a graph that is written there; asserts that it could be. Processes take turns.

    Args:
        folder: where ninja works.
        graph: what build.ninja says.
        made: what is to be built there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "build.ninja").write_text(graph)
        done = subprocess.run([sys.executable, "-m", "ninja", "-C", str(folder), *made], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / made[0]
