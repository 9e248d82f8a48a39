"""The tutorials' models of those layers: the encoder-decoder, the post-norm encoder, the character language model."""

import math

import torch
from torch import nn

from .layers import (
    ConvolutionFeedForward,
    FeedForward,
    LayerNorm,
    MultiHeadAttention,
    PositionalEncoding,
    ResidualConnection,
    SublayerConnection,
    VisibleAttention,
    clones,
)


class EncoderLayer(nn.Module):
    def __init__(self, size, self_attn, feed_forward, dropout):
        super().__init__()
        self.self_attn, self.feed_forward = self_attn, feed_forward
        self.sublayer = clones(SublayerConnection(size, dropout), 2)

    def forward(self, x, mask):
        x = self.sublayer[0](x, lambda y: self.self_attn(y, y, y, mask))
        return self.sublayer[1](x, self.feed_forward)


class DecoderLayer(nn.Module):
    """Three sublayers, the masked self-attention among them (M19, M29); the memory's padding is masked (M26)."""

    def __init__(self, size, self_attn, src_attn, feed_forward, dropout):
        super().__init__()
        self.self_attn, self.src_attn, self.feed_forward = self_attn, src_attn, feed_forward
        self.sublayer = clones(SublayerConnection(size, dropout), 3)

    def forward(self, x, memory, src_mask, tgt_mask):
        x = self.sublayer[0](x, lambda y: self.self_attn(y, y, y, tgt_mask))
        x = self.sublayer[1](x, lambda y: self.src_attn(y, memory, memory, src_mask))
        return self.sublayer[2](x, self.feed_forward)


class Stack(nn.Module):
    """N layers and a final norm, which belongs to the pre-norm order alone (M25)."""

    def __init__(self, layer, count, size):
        super().__init__()
        self.layers, self.norm = clones(layer, count), LayerNorm(size)

    def forward(self, x, *given):
        for layer in self.layers:
            x = layer(x, *given)
        return self.norm(x)


class EncoderDecoder(nn.Module):
    """Pre-norm with the tutorial's LayerNorm; embeddings scaled by sqrt(d_model), not by the inner width (M10)."""

    def __init__(self, source_vocab, target_vocab, layers=2, d_model=32, d_ff=48, heads=4, dropout=0.1):
        super().__init__()

        def attention():
            return MultiHeadAttention(d_model, heads, dropout)

        def feed_forward():
            return ConvolutionFeedForward(d_model, d_ff, dropout)

        encoder = EncoderLayer(d_model, attention(), feed_forward(), dropout)
        decoder = DecoderLayer(d_model, attention(), attention(), feed_forward(), dropout)
        self.encoder, self.decoder = Stack(encoder, layers, d_model), Stack(decoder, layers, d_model)
        self.source, self.target = nn.Embedding(source_vocab, d_model), nn.Embedding(target_vocab, d_model)
        self.position, self.scale = PositionalEncoding(d_model, dropout), math.sqrt(d_model)
        self.generator = nn.Linear(d_model, target_vocab)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, source, target):
        src_mask = (source != 0)[:, None, None, :]
        length = target.shape[1]
        future = torch.ones(1, 1, length, length, dtype=torch.bool, device=target.device).tril()  # (M21)
        tgt_mask = future & (target != 0)[:, None, None, :]
        memory = self.encoder(self.position(self.source(source) * self.scale), src_mask)
        x = self.decoder(self.position(self.target(target) * self.scale), memory, src_mask, tgt_mask)
        return self.generator(x)


class SelfAttention(nn.Module):
    def __init__(self, d_model, heads, dropout):
        super().__init__()
        self.attention = MultiHeadAttention(d_model, heads, dropout)

    def forward(self, x, mask=None):
        return self.attention(x, x, x, mask)


class PostNormEncoder(nn.Module):
    """norm(x + dropout(sublayer(x))) around both sublayers; dropout everywhere (M4), no final norm (M25)."""

    def __init__(self, layers=2, d_model=32, d_ff=48, heads=4, dropout=0.1):
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(layers):
            attention = ResidualConnection(SelfAttention(d_model, heads, dropout), d_model, dropout)
            self.layers.append(attention)
            self.layers.append(ResidualConnection(FeedForward(d_model, d_ff, dropout), d_model, dropout))

    def forward(self, x, mask=None):
        for i, layer in enumerate(self.layers):
            x = layer(x, mask) if i % 2 == 0 else layer(x)
        return x


class CharacterModel(nn.Module):
    """Scores of the next character, and the weights of every layer.

    Mended: the causal mask is there (M13); batch first all the way, and a projection to the vocabulary (M11).
    """

    def __init__(self, vocab, layers=2, d_model=32, d_ff=48, heads=4, dropout=0.1):
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocab, d_model), PositionalEncoding(d_model, dropout)
        self.attentions = nn.ModuleList(VisibleAttention(d_model, heads, dropout) for _ in range(layers))
        self.feed_forwards = nn.ModuleList(FeedForward(d_model, d_ff, dropout) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(d_model) for _ in range(2 * layers))
        self.dropout, self.scale = nn.Dropout(dropout), math.sqrt(d_model)
        self.output = nn.Linear(d_model, vocab)

    def forward(self, ids):
        x = self.position(self.embedding(ids) * self.scale)
        future = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
        maps = []
        for i, (attention, feed_forward) in enumerate(zip(self.attentions, self.feed_forwards, strict=True)):
            y, weights = attention(x, x, x, future)
            maps.append(weights)
            x = self.norms[2 * i](x + self.dropout(y))
            x = self.norms[2 * i + 1](x + self.dropout(feed_forward(x)))
        return self.output(x), torch.stack(maps)
