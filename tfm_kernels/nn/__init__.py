"""Drop-in modules: torch.nn's constructors, forwards and state_dicts, on the fused operations."""

from .attention import MultiheadAttention as MultiheadAttention
from .embedding import PositionalEncoding as PositionalEncoding
from .embedding import TokenEmbedding as TokenEmbedding
from .ffn import FeedForward as FeedForward
from .layer_norm import LayerNorm as LayerNorm
from .layer_norm import RMSNorm as RMSNorm
