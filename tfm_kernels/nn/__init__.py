"""Drop-in modules: torch.nn's constructors, forwards and state_dicts, on the fused operations."""

from .attention import MultiheadAttention as MultiheadAttention
from .embedding import PositionalEncoding as PositionalEncoding
from .embedding import TokenEmbedding as TokenEmbedding
from .ffn import FeedForward as FeedForward
from .int8 import Int8Linear as Int8Linear
from .int8 import Int8MultiheadAttention as Int8MultiheadAttention
from .layer_norm import LayerNorm as LayerNorm
from .layer_norm import RMSNorm as RMSNorm
from .loss import LinearCrossEntropyLoss as LinearCrossEntropyLoss
from .transformer import Transformer as Transformer
from .transformer import TransformerDecoder as TransformerDecoder
from .transformer import TransformerEncoder as TransformerEncoder
from .transformer_layer import TransformerDecoderLayer as TransformerDecoderLayer
from .transformer_layer import TransformerEncoderLayer as TransformerEncoderLayer
