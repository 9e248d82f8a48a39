"""How the attention kernels are launched, and how often that compiles them: no GPU needed."""

import random

import pytest
import torch

from tfm_kernels.triton import _attention_call, attention_bwd, attention_fwd
from tfm_kernels.triton._attention_call import Config

ANYWHERE = [-(1 << 40), 1 << 40, -(1 << 40), 1 << 40]


def test_launches():
    """Every head has its width, every tile a power of two, and few queries a small tile."""
    for capability in ((8, 0), (9, 0), (10, 0), (12, 0)):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            for extras in ("none", "aligned", "unaligned"):
                for width in range(1, 257):
                    for queries in (1, 64, 65, 10**6):
                        config = attention_fwd.pick_config(width, queries, extras, dtype, capability)
                        assert config.block_d >= width and config.block_d in (16, 32, 64, 128, 256)
                        assert config.block_m in (32, 64, 128) and config.block_n in (16, 32, 64)
                        assert config.num_warps in (4, 8) and (queries > 64 or config.block_m <= 64)
    pick = attention_fwd.pick_config
    assert pick(64, 4096, "none", torch.bfloat16, (9, 0)) == Config(128, 64, 64, 0, 8, 3)
    assert pick(128, 4096, "none", torch.bfloat16, (9, 0)) == Config(128, 64, 128, 0, 8, 2)


def random_heads(rng, batch, heads, length, width, dtype):
    """(B, H, T, D) of any order and any start."""
    start, extra = rng.choice((0, 8, 1)), rng.choice((0, 8, 3))
    flat = torch.empty(start + batch * heads * length * (width + extra), dtype=dtype)[start:]
    if rng.random() < 0.5:
        return flat.view(batch, length, heads, width + extra)[..., :width].transpose(1, 2)
    return flat.view(batch, heads, length, width + extra)[..., :width]


def random_pairs(rng, sizes, dtype):
    """Something per pair, broadcast along any axes."""
    shape = [rng.choice((1, size)) for size in sizes]
    pairs = torch.empty(shape, dtype=dtype)
    return pairs.transpose(2, 3).contiguous().transpose(2, 3) if rng.random() < 0.3 else pairs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_compilations_are_bounded(dtype, compilations):
    """1,000 random calls of one kind are bound as Triton binds them, through the launchers."""
    rng = random.Random(1)
    seed = torch.tensor(5)
    for _ in range(1000):
        batch, key_heads, group = rng.choice((1, 2, 3)), rng.choice((1, 2)), rng.choice((1, 2))
        queries, keys = (rng.choice((1, 8, rng.randrange(1, 200), 8 * rng.randrange(1, 30))) for _ in range(2))
        width, value_width = (rng.choice((rng.randrange(1, 257), 8 * rng.randrange(1, 33))) for _ in range(2))
        sizes = (batch, key_heads * group, queries, keys)
        q = random_heads(rng, batch, sizes[1], queries, width, dtype)
        k, v = (random_heads(rng, batch, key_heads, keys, w, dtype) for w in (width, value_width))
        bias, keep = random_pairs(rng, sizes, torch.float32), random_pairs(rng, sizes, torch.bool)
        window = rng.choice((ANYWHERE, [-5, 5, -9, 0]))
        lengths = torch.zeros(batch, dtype=torch.int64)
        options = (bias, keep, lengths, None, None, queries, keys, window, rng.choice((1.0, -0.5, 0.0)))
        rest = (rng.choice((0.1, 0.5, 1.0)), seed, True)
        out, lse = attention_fwd.attention_fwd(q, k, v, *options, *rest)
        dout = random_heads(rng, batch, sizes[1], queries, value_width, dtype)
        attention_bwd.attention_bwd(dout, lse, q, k, v, out, lse, *options, *rest, True)
    counts = {name: len(found) for name, found in compilations.items()}
    backward = {f"attention_bwd_{name}_kernel" for name in attention_bwd.KERNELS}
    assert set(counts) == {"attention_fwd_kernel", "keep_tiles_kernel", *backward}, counts
    assert counts["attention_fwd_kernel"] <= attention_fwd.MAX_COMPILATIONS, counts
    assert counts["keep_tiles_kernel"] <= _attention_call.MAX_COMPILATIONS, counts
    assert all(counts[name] <= attention_bwd.MAX_COMPILATIONS for name in backward), counts


def test_alignment():
    x = torch.zeros(2, 3, 16, 24, dtype=torch.bfloat16)
    assert _attention_call.rows_aligned(x, x.transpose(1, 2), x[..., :16], x[..., 8:], x[:1].expand(5, 3, 16, 24))
    for wrong in (x[..., :12], x[..., 1:9], x.transpose(2, 3), torch.zeros(2, 3, 16, 20)[..., :16].bfloat16()[..., 1:]):
        assert not _attention_call.rows_aligned(wrong)
