"""The layers that the tutorials build, written anew with their mistakes mended.

Numbers M... are those of the list of mistakes: what the tutorial had is named, what stands here is right.
"""

import copy
import math

import torch
from torch import nn


class ScaledDotProductAttention(nn.Module):
    """softmax(q k^T / sqrt(d_k)) v, and the weights.

    Mended: hidden scores are -inf, not -1e9, and a row that sees nothing gives 0 (M1); the scale is that of the head's
    real width (M9, M17); dropout acts on the weights (M4); the weights are returned (M8).
    """

    def __init__(self, dropout):
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -torch.inf)
        weights = scores.softmax(-1)
        if mask is not None:
            weights = weights.masked_fill(mask == 0, 0.0)  # also where a whole row was -inf, and so NaN
        return self.dropout(weights) @ v, weights


class MultiHeadAttention(nn.Module):
    """Projections with biases, heads side by side, an output projection.

    Mended: d_model has to be a multiple of heads (M3); one forward for self- and cross-attention (M18); heads are put
    together along the features, not along time (M7).
    """

    def __init__(self, d_model, heads, dropout=0.1):
        super().__init__()
        if d_model % heads:
            raise ValueError(f"d_model {d_model} is no multiple of heads {heads}")
        self.heads = heads
        self.w_q, self.w_k, self.w_v, self.w_o = (nn.Linear(d_model, d_model) for _ in range(4))
        self.attention = ScaledDotProductAttention(dropout)

    def forward(self, q, k, v, mask=None):
        batch = q.shape[0]
        q, k, v = (
            layer(t).view(batch, -1, self.heads, t.shape[-1] // self.heads).transpose(1, 2)
            for layer, t in ((self.w_q, q), (self.w_k, k), (self.w_v, v))
        )
        x, _ = self.attention(q, k, v, mask)
        return self.w_o(x.transpose(1, 2).contiguous().view(batch, -1, self.w_o.in_features))


class VisibleAttention(MultiHeadAttention):
    """The same, returning (output, weights), which the article about looking at attention is for (M8)."""

    def forward(self, q, k, v, mask=None):
        batch = q.shape[0]
        q, k, v = (
            layer(t).view(batch, -1, self.heads, t.shape[-1] // self.heads).transpose(1, 2)
            for layer, t in ((self.w_q, q), (self.w_k, k), (self.w_v, v))
        )
        x, weights = self.attention(q, k, v, mask)
        return self.w_o(x.transpose(1, 2).contiguous().view(batch, -1, self.w_o.in_features)), weights


class LayerNorm(nn.Module):
    """gamma (x - mean) / sqrt(var + eps) + beta, with the N - 1 variance and the eps inside, as the tutorial has it.

    Kept on purpose, because its numbers differ from torch's (M24): the variance is the unbiased one, eps is 1e-12.
    """

    def __init__(self, d_model, eps=1e-12):
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(d_model)), nn.Parameter(torch.zeros(d_model))
        self.eps = eps

    def forward(self, x):
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True)
        return self.gamma * (x - mean) / torch.sqrt(var + self.eps) + self.beta


class FeedForward(nn.Module):
    """fc2(dropout(relu(fc1(x)))): dropout behind the activation (M2)."""

    def __init__(self, d_model, d_ff, dropout=0.1):
        super().__init__()
        self.fc1, self.fc2, self.dropout = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model), nn.Dropout(dropout)

    def forward(self, x):
        return self.fc2(self.dropout(torch.relu(self.fc1(x))))


class ConvolutionFeedForward(nn.Module):
    """The same as two convolutions of width 1.

    Dropout acts on (B, T, F), as in the linear form: the random rule counts rows and columns, so that with dropout too
    both forms are one function.
    """

    def __init__(self, d_model, d_ff, dropout=0.1):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(d_model, d_ff, 1), nn.Conv1d(d_ff, d_model, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        hidden = self.dropout(torch.relu(self.conv1(x.transpose(1, 2))).transpose(1, 2))
        return self.conv2(hidden.transpose(1, 2)).transpose(1, 2)


class ResidualConnection(nn.Module):
    """Post-norm: norm(x + dropout(sublayer(x, ...))). Mended: the sum is with x (M5)."""

    def __init__(self, sublayer, d_model, dropout=0.1):
        super().__init__()
        self.sublayer, self.norm, self.dropout = sublayer, nn.LayerNorm(d_model), nn.Dropout(dropout)

    def forward(self, x, *args):
        return self.norm(x + self.dropout(self.sublayer(x, *args)))


class SublayerConnection(nn.Module):
    """Pre-norm: x + dropout(sublayer(norm(x))). The norm is of the input (M23), for q, k and v alike (M6)."""

    def __init__(self, size, dropout=0.1):
        super().__init__()
        self.norm, self.dropout = LayerNorm(size), nn.Dropout(dropout)

    def forward(self, x, sublayer):
        return x + self.dropout(sublayer(self.norm(x)))


class PositionalEncoding(nn.Module):
    """dropout(x + pe): exponents 2 floor(i / 2) / d_model, no row of zeros in front, any d_model (M12)."""

    def __init__(self, d_model, dropout=0.1, max_len=5000):
        super().__init__()
        position = torch.arange(max_len, dtype=torch.float64)[:, None]
        i = torch.arange(d_model)
        angle = position / 10000 ** (2 * (i // 2).double() / d_model)
        self.register_buffer("pe", torch.where(i % 2 == 0, angle.sin(), angle.cos()).float())
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(x + self.pe[: x.shape[1]])


def clones(module, count):
    """Copies with weights of their own (M27)."""
    return nn.ModuleList(copy.deepcopy(module) for _ in range(count))
