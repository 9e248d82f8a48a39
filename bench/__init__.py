"""Benchmarks: each kernel beside its PyTorch peers, proven first, timed in turns, held against the limits.

``python -m bench`` runs the grid of shapes.py and writes results/<device>/<op>.json; ``python -m bench.report`` prints
what they say. ``pytest bench/ops/bench_<op>.py`` runs the same cases under pytest-benchmark. ``python -m bench.gpu``
proves and times the kernels of a GPU.
"""
