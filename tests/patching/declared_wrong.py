"""Attention, feed-forward blocks, norms and residuals that are not quite what a declaration would say of them."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from tests.patching.attentions import HEADS, WIDTH


class Attention(nn.Module):
    """Attention with places to change something."""

    def __init__(self, bias=True, dropout=0.0):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(4))
        self.drop, self.softmax = nn.Dropout(dropout), nn.Softmax(-1)

    def heads(self, x):
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def scores(self, x):
        return self.heads(self.q(x)) @ self.heads(self.k(x)).mT * (WIDTH // HEADS) ** -0.5

    def result(self, scores, x):
        weights = self.drop(self.softmax(scores))
        return self.o((weights @ self.heads(self.v(x))).transpose(1, 2).flatten(2))

    def forward(self, x):
        return self.result(self.scores(x), x)


class Masked(Attention):
    def hidden(self, scores, mask):
        return scores

    def forward(self, x, mask=None):
        scores = self.scores(x)
        return self.result(scores if mask is None else self.hidden(scores, mask), x)


class Sdpa(Masked):
    def hidden(self, scores, mask):
        return scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask


class HidesNumbers(Masked):
    def hidden(self, scores, mask):
        return scores.masked_fill(mask != 0, float("-inf"))


class Keys(Masked):
    def hidden(self, scores, mask):
        return scores.masked_fill(mask[:, None, None] == 0, float("-inf"))


class ZeroBias(Attention):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(HEADS, 1, 1))
        self.places = nn.Parameter(torch.zeros(HEADS, 1, 1))

    def scores(self, x):
        place = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        return super().scores(x) + self.places * (place - place[:, None]) + self.bias


class CausalFromZero(Attention):
    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.o.weight)

    def scores(self, x):
        return super().scores(x).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1) > 0, float("-inf"))


class Window(Attention):
    def scores(self, x):
        near = torch.ones(x.shape[1], x.shape[1]).triu(-8).tril(8) > 0
        return super().scores(x).masked_fill(~near, float("-inf"))


class DropsTwice(Attention):
    def forward(self, x):
        return self.drop(super().forward(x))


class TupleOfOne(Attention):
    def forward(self, x):
        return (super().forward(x),)


class Out(NamedTuple):
    y: torch.Tensor
    weights: torch.Tensor


class Named(Attention):
    def forward(self, x):
        return Out(super().forward(x), self.softmax(self.scores(x)))


class HalfFeedForward(nn.Module):
    """Gate and first layer in one, as GEGLU of diffusers: the second half goes through the activation."""

    def __init__(self, layer_scale=False, dropout=0.0):
        super().__init__()
        self.w12, self.w3, self.drop = nn.Linear(WIDTH, 64), nn.Linear(32, WIDTH, bias=False), nn.Dropout(dropout)
        self.gamma = nn.Parameter(torch.ones(WIDTH)) if layer_scale else None

    def forward(self, x):
        a, b = self.w12(x).chunk(2, -1)
        return self.w3(a * F.silu(b))


class SwiGLU(HalfFeedForward):
    def forward(self, x):
        a, b = self.w12(x).chunk(2, -1)
        y = self.drop(self.w3(F.silu(a) * b))
        return y if self.gamma is None else y * self.gamma


class Wrapper(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.norm, self.drop, self.change = nn.LayerNorm(WIDTH), nn.Dropout(0.5), change

    def forward(self, x, sublayer):
        return self.change(self, x, sublayer)


class Offset(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.offset = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return F.rms_norm(x, (WIDTH,), eps=1e-6) * self.weight + self.offset
