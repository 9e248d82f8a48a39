"""How the norms' Triton kernels are launched, and how often that compiles them: no GPU needed."""

import random

import pytest
import torch

from tfm_kernels.triton import _launch, _layer_norm_sums, layer_norm_bwd, layer_norm_fwd

WIDTHS = (1, 63, 64, 65, 768, 1024, 2048, 2049, 8192, 8193, 16384, 16385, 32768, 32769, 65536)


def test_launches():
    """Every row has a program, every feature a place, and no program more than the GPU's limits."""
    for width in WIDTHS:
        for aligned in (True, False):
            config = layer_norm_fwd.pick_config(width, aligned, torch.bfloat16)
            assert (width > config.block_n) == (width > (16384 if aligned else 8192)) and config.num_warps <= 32
            assert config.block_m * config.block_n <= 1024 * config.num_warps
        for rows in (1, 5, 1000, 10**6):
            for capability in ((8, 0), (9, 0), (10, 0), (12, 0)):
                for aligned in (True, False):
                    config = layer_norm_bwd.pick_config(rows, width, aligned, capability)
                    room = 8192 if aligned else 4096
                    assert (width > config.block_n) == (width > 2 * room) and config.holds_sums == (width <= room)
                    assert 1 <= config.programs <= 3 * 148
                    assert config.programs <= max(1, -(-rows // config.block_m))
                    sums = _layer_norm_sums.pick_config(rows, width, aligned, capability)
                    assert 1 <= sums.parts <= -(-rows // sums.block_m)
                    assert sums.parts == 1 or sums.parts * -(-width // sums.block_n) <= 4 * 148
    assert layer_norm_fwd.pick_config(1024, True, torch.float16) == layer_norm_fwd.Config(1, 1024, 1, None)
    assert layer_norm_bwd.pick_config(8192, 1024, True, (9, 0)) == layer_norm_bwd.Config(2, 1024, 4, 3, 396, 168)


def random_rows(rng, rows, width, dtype):
    """Rows of any stride and any start."""
    stride, start = (
        rng.choice((0, width, width + 8 * rng.randrange(5), width + rng.randrange(9))),
        rng.choice((0, 8, 1)),
    )
    return torch.empty(start + stride * (rows - 1) + width, dtype=dtype)[start:].as_strided((rows, width), (stride, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_compilations_are_bounded(dtype, compilations):
    """1,000 random calls of one kind are bound as Triton binds them, through the launchers."""
    rng = random.Random(1)
    seed = torch.tensor(5)
    for _ in range(1000):
        width = rng.choice((rng.randrange(1, 65537), rng.randrange(1, 2049), 8 * rng.randrange(1, 8193)))
        rows = rng.choice((1, 2, 16, rng.randrange(1, 1 + max(1, 100_000 // width))))
        x, residual, dy, dz, z = (random_rows(rng, rows, width, dtype) for _ in range(5))
        weight = torch.empty(width + 1, dtype=dtype)[rng.randrange(2) :][:width]
        p, eps = rng.choice((0.1, 0.5, 0.9, 1.0)), rng.choice((1e-5, 1.0))
        layer_norm_fwd.layer_norm_fwd(x, residual, weight, weight, eps, 1.0 - eps, False, False, p, seed, None)
        statistics = torch.empty(2, rows)
        layer_norm_bwd.layer_norm_bwd(
            dy, dz, z, *statistics, weight, weight, 1.0 - eps, False, True, p, seed, None, True, True
        )
    counts = {name: len(keys) for name, keys in compilations.items()}
    assert set(counts) == {
        "layer_norm_fwd_kernel", "layer_norm_fwd_walk_kernel", "layer_norm_bwd_kernel", "layer_norm_bwd_walk_kernel",
        "layer_norm_bwd_columns_kernel", "layer_norm_bwd_sum_kernel",
    }  # fmt: skip
    forward, backward = (sum(count for name, count in counts.items() if d in name) for d in ("fwd", "bwd"))
    assert forward <= layer_norm_fwd.MAX_COMPILATIONS and backward <= layer_norm_bwd.MAX_COMPILATIONS, counts


def test_alignment():
    x = torch.zeros(64 * 24, dtype=torch.bfloat16)
    assert _launch.aligned(16, x.view(-1, 24)[:, :16], None, x[:16], x.view(-1, 24)[:1].expand(5, 24)[:, :16])
    assert not _launch.aligned(12, x.view(-1, 24)[:, :12])
    assert not _launch.aligned(16, x[4:].view(-1, 4)[:-4].reshape(-1)[:160].view(-1, 16))
    assert not _launch.aligned(16, x[: 20 * 70].view(-1, 20)[:, :16])
    assert not _launch.aligned(16, x.view(-1, 24)[:, :16], x[1:17])


def test_dropout_arguments_are_int32():
    """An argument of another width would be compiled anew."""
    for p in (2.0**-40, 2.0**-32, 0.1, 0.5, 0.7, 1.0 - 2.0**-30, 1.0):
        _, last_dropped = _launch.check_dropout("op", p, torch.tensor(1))
        assert -(2**31) <= last_dropped < 2**31
    assert _launch.check_dropout("op", 0.0, None) == (1.0, 0)
