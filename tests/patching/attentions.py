"""Attention as people write it today, in the styles of libraries and tutorials, each with its declaration."""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS = 16, 4


class CausalSelfAttention(nn.Module):
    """In the style of nanoGPT: one projection, a causal mask of its own, dropout after the output layer too."""

    def __init__(self, dropout=0.0, bias=True):
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.n_head, self.n_embd, self.dropout = HEADS, WIDTH, dropout
        self.register_buffer("tril", torch.ones(32, 32).tril().view(1, 1, 32, 32))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (
            t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            for t in self.c_attn(x).split(self.n_embd, dim=2)
        )
        scores = (q @ k.transpose(-2, -1)) * k.size(-1) ** -0.5
        scores = scores.masked_fill(self.tril[:, :, :T, :T] == 0, float("-inf"))
        y = self.attn_dropout(scores.softmax(-1)) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))


NANO = dict(
    qkv="c_attn", out="c_proj", heads="n_head", causal=True, dropout="attn_dropout", out_dropout="resid_dropout"
)


class FlashAttention(CausalSelfAttention):
    """nanoGPT's other branch, whose probability is an attribute."""

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (
            t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            for t in self.c_attn(x).split(self.n_embd, dim=2)
        )
        p = self.dropout if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=p, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))


class ImageAttention(nn.Module):
    """In the style of timm: qkv side by side, a mask as F.scaled_dot_product_attention takes it, causal by argument."""

    def __init__(self, dropout=0.0, norm=nn.Identity):
        super().__init__()
        self.num_heads, self.scale = HEADS, (WIDTH // HEADS) ** -0.5
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_norm, self.k_norm = norm(WIDTH // HEADS), norm(WIDTH // HEADS)
        self.attn_drop, self.proj_drop = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x, attn_mask=None, is_causal=False):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        p = self.attn_drop.p if self.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=p, is_causal=is_causal)
        return self.proj_drop(self.proj(x.transpose(1, 2).reshape(B, N, C)))


IMAGE = dict(qkv="qkv", out="proj", heads="num_heads", scale="scale", mask="sdpa", dropout="attn_drop")
IMAGE |= dict(out_dropout="proj_drop")


class GroupedAttention(nn.Module):
    """Fewer heads of keys and values, no output layer, and padding as (B, Tk)."""

    def __init__(self, kv_heads=2):
        super().__init__()
        self.n_kv, self.wq = kv_heads, nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk, self.wv = (nn.Linear(WIDTH, WIDTH // HEADS * kv_heads, bias=False) for _ in range(2))

    def forward(self, x, pad=None):
        q, k, v = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.wq, self.wk, self.wv)
        )
        k, v = (t.repeat_interleave(HEADS // self.n_kv, dim=1) for t in (k, v))
        scores = q @ k.mT  # not divided by anything, as in T5
        if pad is not None:
            scores = scores.masked_fill(pad[:, None, None, :], float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


GROUPED = dict(query="wq", key="wk", value="wv", out=None, heads=HEADS, kv_heads="n_kv", scale=1.0)
GROUPED |= dict(mask="hide", mask_axis="keys")


class PreNormAttention(nn.Module):
    """In the style of vit-pytorch: the norm is inside, the output layer a Sequential with its dropout."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.heads, self.dim_head, self.norm = HEADS, 6, nn.LayerNorm(WIDTH)
        self.attend, self.dropout = nn.Softmax(dim=-1), nn.Dropout(dropout)
        self.to_qkv = nn.Linear(WIDTH, 3 * HEADS * 6, bias=False)
        self.to_out = nn.Sequential(nn.Linear(HEADS * 6, WIDTH), nn.Dropout(dropout))

    def forward(self, x):
        parts = self.to_qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        weights = self.dropout(self.attend(q @ k.mT * self.dim_head**-0.5))
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))


PRE_NORM = dict(qkv="to_qkv", out="to_out", norm="norm", heads="heads", dropout="dropout")


class Cross(nn.Module):
    """Values, keys, query, in the order of a much-read tutorial; the score's mask is added."""

    def __init__(self, keys=10, values=6):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(WIDTH, 12), nn.Linear(keys, 12), nn.Linear(values, 20)
        self.o = nn.Linear(20, WIDTH)

    def forward(self, values, keys, query, bias=None):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (self.q(query), self.k(keys), self.v(values)))
        scores = q @ k.mT * 6**-0.5
        scores = scores if bias is None else scores + bias
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


CROSS = dict(query="q", key="k", value="v", out="o", heads=2, mask="add", arguments=("query", "keys", "values", "bias"))
