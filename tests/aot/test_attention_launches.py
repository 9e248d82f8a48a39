"""How the attention kernels are launched, and how often that compiles them: no GPU needed."""

import random

import pytest
import torch

from tfm_kernels.triton import _attention_call, _attention_fwd_few, _launch, attention_bwd, attention_fwd
from tfm_kernels.triton._attention_call import Config

ANYWHERE = [-(1 << 40), 1 << 40, -(1 << 40), 1 << 40]


def test_launches():
    """Every head has its width, every tile a power of two, and few queries a small tile."""
    for capability in ((8, 0), (8, 6), (9, 0), (10, 0), (12, 0)):
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
    assert pick(128, 4096, "none", torch.bfloat16, (9, 0)) == Config(64, 64, 128, 0, 4, 3)
    assert pick(128, 4096, "none", torch.bfloat16, (10, 0)) == Config(128, 64, 128, 0, 8, 2)


def test_warps_share_what_they_multiply():
    """Where each warp multiplies by itself: 16 rows of the result for each, or 8 columns of the weights."""
    pick, bwd = attention_fwd.pick_config, attention_bwd.pick_config
    for capability in ((7, 5), (8, 0), (8, 6), (8, 9), (12, 0), (12, 1)):
        assert _launch.by_warps(capability)
        for extras in ("none", "aligned", "unaligned"):
            for width in range(1, 257):
                call = (extras, torch.bfloat16, capability)
                of_rows = [pick(width, 64, *call), pick(width, 65, *call), bwd("queries", width, *call)]
                of_keys = bwd("keys", width, *call)
                found = [(config, config.block_m, config.block_n) for config in of_rows]
                for config, rows, columns in [*found, (of_keys, of_keys.block_n, of_keys.block_m)]:
                    share = rows / 16 if rows >= config.block_d else columns / 8
                    assert share >= config.num_warps, (capability, width, extras, config)
    assert not any(_launch.by_warps(capability) for capability in ((9, 0), (10, 0), (10, 3), (11, 0)))


def few(width, group, queries, keys, units, extras="none", dtype=torch.bfloat16, capability=(9, 0), reach=None):
    """pick_config of few queries against many keys."""
    reach = keys if reach is None else reach
    return _attention_fwd_few.pick_config(width, group, queries, keys, reach, units, extras, dtype, capability)


def test_launches_of_few_queries():
    for capability in ((8, 0), (8, 6), (9, 0), (10, 0), (12, 0)):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            for extras in ("none", "aligned", "unaligned"):
                for width in range(1, 257):
                    for group, queries, keys in ((1, 1, 65), (8, 16, 10**6), (17, 1, 4096)):
                        config = few(width, group, queries, keys, 8, extras, dtype, capability)
                        assert config.block_d >= width and config.block_d in (16, 32, 64, 128, 256)
                        assert config.block_m == (16 if group * queries <= 16 else 32)
                        assert config.block_n in (16, 32, 64) and config.num_warps in (4, 8)
    assert few(64, 8, 17, 10**6, 8) is None and few(64, 8, 1, 64, 8) is None and few(64, 8, 0, 100, 8) is None
    assert few(64, 8, 1, 10**6, 8, reach=64) is None


def test_parts_fill_the_multiprocessors():
    """The shapes of a decoding step: two programs on each of 132 multiprocessors, none of them idle for long."""
    launch = (16, 64, 128, 0, 4, 3, 255)
    assert few(128, 4, 1, 32768, 64) == _attention_fwd_few.FewConfig(*launch, parts=4, part_tiles=128)
    assert few(128, 4, 1, 32768, 8).parts == 32
    assert few(64, 4, 1, 512, 512).parts == 1 and few(64, 1, 1, 66, 1).parts == 1
    assert few(128, 1, 1, 2**30 - 1, 1).parts == 256
    assert few(128, 4, 1, 32768, 64, reach=1000) == _attention_fwd_few.FewConfig(*launch, parts=4, part_tiles=5)


@pytest.mark.parametrize("seed", range(20))
def test_no_tile_is_lost(seed, monkeypatch):
    """Whatever a band shows to whatever sequence: the parts together have room for all tiles that its queries see."""
    monkeypatch.setattr(_launch, "check_device", lambda op, x: None)
    rng = random.Random(seed)
    for _ in range(50):
        queries, keys = rng.randrange(1, 17), rng.randrange(65, 3000)
        window = [rng.choice((low, rng.randrange(-900, 900))) for low in ANYWHERE]
        q, k = torch.empty(1, 1, queries, 8), torch.empty(1, 1, keys, 8)
        call = _attention_call.Call(
            "test", q, k, k, None, None, None, None, None, queries, keys, window, 1.0, 0.0, None
        )
        config = few(8, 1, queries, keys, rng.choice((1, 64, 500)), reach=call.reach())
        for tq, tk in ((queries, keys), (rng.randrange(1, queries + 1), rng.randrange(1, keys + 1))):
            low, high = max(window[0], window[2] + tk - tq), min(window[1], window[3] + tk - tq)
            begin, end = max(low, 0), min(tk, tq + high)
            assert end - begin <= call.reach(), (window, tq, tk)
            if config is not None and end > begin:
                tiles = -(-end // config.block_n) - begin // config.block_n
                assert tiles <= config.parts * config.part_tiles, (window, tq, tk, config)


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
    """1,000 random calls of one kind are bound as Triton binds them, through the launchers; some decode."""
    rng = random.Random(1)
    seed = torch.tensor(5)
    for _ in range(1000):
        batch, key_heads, group = rng.choice((1, 2, 3)), rng.choice((1, 2)), rng.choice((1, 2))
        queries, keys = (rng.choice((1, 8, rng.randrange(1, 200), 8 * rng.randrange(1, 30))) for _ in range(2))
        if rng.random() < 0.2:
            queries, keys = rng.randrange(1, 17), rng.randrange(200, 3000)
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
    few_queries = _attention_fwd_few.MAX_COMPILATIONS
    assert set(counts) == {"attention_fwd_kernel", "keep_tiles_kernel", *few_queries, *backward}, counts
    assert all(counts[name] <= most for name, most in few_queries.items()), counts
    assert counts["attention_fwd_kernel"] <= attention_fwd.MAX_COMPILATIONS, counts
    assert counts["keep_tiles_kernel"] <= _attention_call.MAX_COMPILATIONS, counts
    assert all(counts[name] <= attention_bwd.MAX_COMPILATIONS for name in backward), counts


def test_alignment():
    x = torch.zeros(2, 3, 16, 24, dtype=torch.bfloat16)
    assert _attention_call.rows_aligned(x, x.transpose(1, 2), x[..., :16], x[..., 8:], x[:1].expand(5, 3, 16, 24))
    for wrong in (x[..., :12], x[..., 1:9], x.transpose(2, 3), torch.zeros(2, 3, 16, 20)[..., :16].bfloat16()[..., 1:]):
        assert not _attention_call.rows_aligned(wrong)


@pytest.mark.parametrize("size", [1, 4])
def test_alignment_of_pairs(size, monkeypatch):
    monkeypatch.setattr(_launch, "check_device", lambda op, x: None)
    q, k = torch.empty(2, 1, 3, 8), torch.empty(2, 1, 24, 8)
    room = torch.zeros(4, 1, 1, 64, dtype=torch.bool if size == 1 else torch.float32)

    def aligned(pairs, keys=24):
        bias, keep = (None, pairs) if size == 1 else (pairs, None)
        call = _attention_call.Call(
            "test", q, k[:, :, :keys], k[:, :, :keys], bias, keep, None, None, None, 3, keys, ANYWHERE, 1.0, 0.0, None
        )
        return call.pairs_aligned

    assert aligned(room[:2, ..., :24]) and aligned(room[:2, ..., 16:40]) and aligned(room[:1, ..., :24])
    assert not aligned(room[:2, ..., :48:2]) and not aligned(room[:2, ..., 2:26]) and not aligned(room[:2, ..., :1])
    assert not aligned(room[:2, ..., :20], keys=20)
    assert not aligned(room.view(-1)[:62].as_strided((2, 1, 1, 24), (26, 26, 26, 1)))
