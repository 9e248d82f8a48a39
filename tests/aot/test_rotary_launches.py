"""How rotary's Triton kernel is launched, and how often that compiles it: no GPU needed."""

import random

import pytest
import torch

from bench.gpu.rotary import TRITON
from tfm_kernels.triton import _launch, _rotary
from tfm_kernels.triton.rotary_bwd import rotary_bwd
from tfm_kernels.triton.rotary_fwd import rotary_fwd

DTYPES = [torch.bfloat16, torch.float32]


def test_launches():
    """A thread of 128 has 16 elements, or 8, whatever the width, and no more features than there are."""
    for width in (1, 2, 7, 16, 17, 64, 70, 96, 128, 200, 256, 257, 4096):
        for aligned, elements in ((True, 2048), (False, 1024)):
            config = _rotary.pick_config(width, aligned)
            assert config.block_m * config.block_n == elements and config.num_warps == 4
            assert config.block_n in (32, 256) or width <= config.block_n < 2 * width
    assert _rotary.pick_config(64, True) == _rotary.Config(32, 64, 4)
    assert _rotary.pick_config(128, True) == _rotary.Config(16, 128, 4)


def random_heads(rng, shape, dtype):
    """(B, H, T, D) of any order of dimensions, any gaps and any start."""
    order = rng.choice(((0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (3, 1, 0, 2)))
    stored = [shape[i] for i in order]
    room = [*stored[:-1], stored[-1] + rng.choice((0, 0, 8, rng.randrange(9)))]
    start = rng.choice((0, 8, 1))
    whole = torch.empty(start + torch.Size(room).numel(), dtype=dtype)[start:].view(room)
    return whole[..., : stored[-1]].permute(*torch.tensor(order).argsort())


@pytest.mark.parametrize("factors", ["same", "f32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compilations_are_bounded(dtype, factors, compilations):
    """1,000 random calls of one kind, by each direction and each order of pairs, are bound as Triton binds them."""
    rng = random.Random(1)
    kind = dtype if factors == "same" else torch.float32
    for _ in range(1000):
        batch, heads, length = (
            rng.choice((1, 2, 3)),
            rng.choice((1, 2, 9)),
            rng.choice((1, 2, 16, rng.randrange(1, 70))),
        )
        width = rng.choice((rng.randrange(1, 600), 8 * rng.randrange(1, 75)))
        turned = rng.choice((width // 2 * 2, width // 16 * 8, 2 * rng.randrange(width // 2 + 1)))
        x = random_heads(rng, (batch, heads, length, width), dtype)
        lead = rng.choice(((), (1,), (batch,)))
        cos, sin = (torch.empty(*lead, length + 1, turned, dtype=kind)[..., :length, :] for _ in range(2))
        interleaved = rng.choice((False, True))
        for turn in (rotary_fwd, rotary_bwd):
            turn(x, cos, sin, interleaved)
    (keys,) = compilations.values()
    assert len(compilations) == 1 and len(keys) == 2 * 2 * _rotary.MAX_COMPILATIONS


@pytest.fixture
def launched(monkeypatch):
    """What the kernel was launched with, call by call; nothing runs."""
    seen = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda **arguments: seen.append({"grid": grid, **arguments})

    monkeypatch.setattr(_launch, "check_device", lambda op, x: None)
    monkeypatch.setattr(_rotary, "rotary_kernel", Kernel())
    return seen


def test_alignment(launched):
    """16 bytes a load where x, y and the factors allow it, and half of what is turned is a multiple of 8."""
    x = torch.empty(2, 5, 3, 64, dtype=torch.bfloat16).transpose(1, 2)
    tables = torch.empty(5, 64, dtype=torch.bfloat16)
    wide = lambda x, cos, interleaved=False: (
        rotary_fwd(x, cos, torch.empty_like(cos), interleaved) is not None and launched.pop()["ALIGNED"]
    )
    assert (
        wide(x, tables) and wide(x, tables, True) and wide(x, tables.float()) and wide(x, tables[:, :16].contiguous())
    )
    assert wide(x, tables.expand(2, 5, 64)) and wide(x.contiguous(), tables) and wide(x, tables[:, :0])
    assert wide(torch.empty(2, 5, 3, 3, 64, dtype=torch.bfloat16)[:, :, 0].transpose(1, 2), tables)  # of q, k and v
    assert not wide(x, tables[:, :24].contiguous()) and wide(x, tables[:, :24].contiguous(), True)
    assert not wide(x, tables[:, :20].contiguous(), True) and not wide(x[..., :60], tables[:, :48].contiguous())
    assert not wide(x, torch.empty(5 * 64 + 1, dtype=torch.bfloat16)[1:].view(5, 64))
    assert not wide(x.transpose(1, 3).contiguous().transpose(1, 3), tables)


def test_one_position_of_many_sequences_is_launched_as_many_positions_of_one(launched):
    """Decoding: 64 sequences of 8 heads are 512 rows side by side, not 64 programs with 8 rows each."""
    x, tables = torch.empty(64, 8, 1, 128, dtype=torch.bfloat16), torch.empty(64, 1, 128, dtype=torch.bfloat16)
    assert rotary_fwd(x, tables, tables, False).shape == x.shape
    (call,) = launched
    assert call["grid"] == (32,) and (call["H"], call["T"]) == (8, 64)
    assert (call["x_stride_t"], call["y_stride_t"], call["cos_stride_t"]) == (1024, 1024, 128)


@pytest.mark.parametrize(
    "shape", [(1, 2**15, 2**15, 2), (1, 1, 2**30, 2), (2**30, 1, 1, 2), (2**30, 1, 2, 2), (1, 1, 1, 2**30)], ids=str
)
def test_sizes_that_int32_does_not_hold_are_refused(shape, launched, monkeypatch):
    x, table = torch.empty(1, dtype=torch.float16).expand(shape), torch.empty(shape[2], 0, dtype=torch.float16)
    monkeypatch.setattr(torch, "empty_like", lambda t: t)
    for turn, name in ((rotary_fwd, "x"), (rotary_bwd, "dy")):
        with pytest.raises(ValueError, match=rf"{name} must have B, H T and D below 2\*\*30, got"):
            turn(x, table, table, False)
    assert not launched


def test_the_cases_of_bench_gpu_reach_every_launch():
    reached, every = set(), set()
    for case in TRITON.cases():
        levels = case.levels
        if levels["layout"] == "contiguous" and all(levels["places"]) and levels["turned"] != "none":
            given = case.inputs()
            turned = given["cos"].shape[-1]
            aligned = levels["d"] % 8 == 0 and turned % (8 if levels["interleaved"] else 16) == 0
            what = levels["dtype"], levels["factors"] == "f32" or levels["dtype"] == "f32", levels["interleaved"]
            reached.add((_rotary.pick_config(levels["d"], aligned), aligned, *what))
    for width in (32, 64, 128, 256):
        for aligned in (True, False):
            for interleaved in (True, False):
                kinds = (("bf16", False), ("bf16", True), ("f16", False), ("f16", True), ("f32", True))
                every |= {(_rotary.pick_config(width, aligned), aligned, *kind, interleaved) for kind in kinds}
    assert every <= reached, f"launches that no case of the proof makes: {every - reached}"
