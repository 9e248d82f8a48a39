"""The fused operations as functions. Every function takes ``backend=`` and explains itself through ``explain()``.

torch.autocast changes nothing in them, whatever the backend: results have the dtype of the tensors. The modules of nn
follow it, by casting before they call, and so does ``scaled_dot_product_attention``, in torch's place.
"""

from .attention import attention as attention
from .attention_varlen import attention_varlen as attention_varlen
from .attention_weights import attention_weights as attention_weights
from .ffn import ffn as ffn
from .int8_ffn import int8_ffn as int8_ffn
from .int8_linear import int8_linear as int8_linear
from .layer_norm import add_layer_norm as add_layer_norm
from .layer_norm import add_rms_norm as add_rms_norm
from .layer_norm import layer_norm as layer_norm
from .layer_norm import rms_norm as rms_norm
from .linear import linear as linear
from .linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from .rotary import rotary as rotary
from .scaled_dot_product_attention import scaled_dot_product_attention as scaled_dot_product_attention
