"""The version of the package, for setup.py, which must not import it, and for whatever is kept from run to run."""

__version__ = "0.1.0"
