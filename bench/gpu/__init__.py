"""The one-command proof on a GPU: the kernels are built, held to the contract, and only then timed beside their peers.

``python -m bench.gpu`` runs the parts of ``parts.py`` in order, each in a process of its own, and writes one JSON file
per part as it goes; ``python -m bench.gpu --report`` prints the table of what was found. A new op joins by a file like
``layer_norm.py`` and a line in ``subjects.py``.
"""
