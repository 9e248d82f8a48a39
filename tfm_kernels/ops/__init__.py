"""The fused operations as functions. Every function takes ``backend=`` and explains itself through ``explain()``."""

from .ffn import ffn as ffn
from .layer_norm import add_layer_norm as add_layer_norm
from .layer_norm import add_rms_norm as add_rms_norm
from .layer_norm import layer_norm as layer_norm
from .layer_norm import rms_norm as rms_norm
