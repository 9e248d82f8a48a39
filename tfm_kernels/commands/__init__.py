"""The commands of ``python -m tfm_kernels``, a file each; what a command needs is imported when it runs."""
