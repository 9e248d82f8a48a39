"""Measuring: the grid, in which each kernel stands beside its PyTorch peers, and a model beside its patched self.

Both are proven first, timed in turns, and have no speed where the proof fails. ``grid.py`` runs the cases of
``shapes.py`` by the subjects of ``ops/``; ``model.py`` takes the user's own model. ``python -m tfm_kernels bench`` runs
them.
"""
