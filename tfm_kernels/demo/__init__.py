"""The demo, ``python -m tfm_kernels.demo``: a real sentence encoder, patched, proven and timed."""
