"""The project's own benchmarks; the harness and the grid of ops are ``tfm_kernels.bench``.

``python -m bench`` runs the grid of its shapes.py and writes results/<device>/<op>.json; ``python -m bench.report``
prints what they say. ``pytest bench/replay.py`` runs the same cases under pytest-benchmark. ``python -m bench.gpu``
proves and times the kernels of a GPU.
"""
