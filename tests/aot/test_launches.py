"""Which launches the Triton kernels choose: plain functions, no GPU and no kernel needed."""

import random

import torch

from tfm_kernels.triton import _launch, layer_norm_bwd, layer_norm_fwd

WIDTHS = (1, 63, 64, 65, 768, 1024, 2048, 2049, 8192, 8193, 16384, 16385, 32768, 32769, 65536)


def test_launches():
    """Every row has a program, every feature a place, and no program more than the GPU's limits."""
    for width in WIDTHS:
        for itemsize in (2, 4):
            config = layer_norm_fwd.pick_config(width, itemsize)
            walked = width > (32768 if itemsize == 2 else 16384)
            assert (width > config.block_n) == walked and config.num_warps <= 32
            assert config.block_m * config.block_n <= 1024 * config.num_warps
        for rows in (1, 5, 1000, 10**6):
            for capability in ((8, 0), (9, 0), (10, 0), (12, 0)):
                config = layer_norm_bwd.pick_config(rows, width, capability)
                assert (width > config.block_n) == (width > 8192)
                assert 1 <= config.programs <= 2 * 148
                assert config.programs <= max(1, -(-rows // config.block_m))
    assert layer_norm_fwd.pick_config(1024, 2) == layer_norm_fwd.Config(1, 1024, 1)
    assert layer_norm_bwd.pick_config(8192, 1024, (9, 0)) == layer_norm_bwd.Config(2, 1024, 8, 2, 264)


def test_compilations_are_bounded():
    """A compilation's key: which arguments are None, their types, and the constexprs. Shapes reach only the last."""
    rng = random.Random(1)
    forward, backward = set(), set()
    for _ in range(1000):
        rows, width = rng.randrange(1, 100_000), rng.choice((rng.randrange(1, 65537), rng.randrange(1, 2049)))
        aligned = _launch.aligned(width, torch.empty(1, 8))
        config = layer_norm_fwd.pick_config(width, 2)
        forward.add((width > config.block_n, config, aligned))
        config = layer_norm_bwd.pick_config(rows, width, (9, 0))
        backward.add((width > config.block_n, config.block_m, config.block_n, config.num_warps, aligned))
    assert len(forward) <= layer_norm_fwd.MAX_COMPILATIONS and len(backward) <= layer_norm_bwd.MAX_COMPILATIONS


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
