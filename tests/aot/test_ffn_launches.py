"""How ffn's Triton kernels are launched, and how often that compiles them: no GPU needed."""

import math
import random

import pytest
import torch

from bench.gpu.ffn import TRITON
from tfm_kernels.triton import _gemm, _launch, _sums, ffn_bwd, ffn_fwd
from tfm_kernels.triton._gemm import Config

CAPABILITIES = ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))
KINDS = ("half", "ieee", "tf32")


def test_launches():
    """Every tile has a program, no program is without one, and every k belongs to one part."""
    for capability in CAPABILITIES:
        for kind in KINDS:
            for aligned in (True, False):
                for M, N, K in ((1, 1, 1), (64, 2048, 512), (8192, 512, 8192), (10**6, 4096, 10**6), (1, 9, 10**5)):
                    for config in (
                        _gemm.pick_config(M, N, kind, aligned, capability),
                        _gemm.pick_split(M, N, K, kind, aligned, capability),
                        ffn_fwd.pick_config(M, N, kind, False, aligned, capability),
                        ffn_fwd.pick_config(M, N, kind, True, aligned, capability),
                        ffn_bwd.pick_config(M, N, kind, False, aligned, capability),
                        ffn_bwd.pick_config(M, N, kind, True, aligned, capability),
                    ):
                        assert 1 <= config.programs <= _gemm.tiles(M, N, config) * config.splits
                        assert config.programs <= 2 * 148 and config.num_warps in (4, 8)
                        assert config.splits == 1 or K >= config.splits * _gemm.LEAST_K


def test_launches_of_an_h200():
    """8192 rows of a block of 1024 and 4096."""
    at = {"kind": "half", "aligned": True, "capability": (9, 0)}
    assert ffn_fwd.pick_config(8192, 4096, gated=False, **at) == Config(128, 128, 64, 4, 3, 264)
    assert ffn_fwd.pick_config(8192, 4096, gated=True, **at) == Config(128, 64, 64, 4, 3, 264)
    assert _gemm.pick_config(8192, 1024, **at) == Config(128, 256, 64, 8, 3, 132)
    assert ffn_bwd.pick_config(8192, 4096, plain=True, **at) == Config(128, 128, 64, 4, 3, 264)
    assert ffn_bwd.pick_config(8192, 4096, plain=False, **at) == Config(64, 128, 64, 4, 3, 264)
    assert _gemm.pick_split(4096, 1024, 8192, **at) == Config(128, 256, 64, 8, 3, 128)  # 128 tiles for 132 are enough
    assert _gemm.pick_config(1792, 2048, **at) == Config(128, 128, 64, 4, 3, 224)  # 112 of 128 x 256 are not
    assert _gemm.pick_split(2048, 512, 8192, **at) == Config(128, 128, 64, 4, 3, 256, splits=4)


def test_sums():
    for M in (0, 1, 32, 33, 300, 8192, 10**7):
        for N in (1, 64, 1024, 10**6):
            config = _sums.pick_config(M, N)
            assert config.chunks == 1 or M >= 256 * config.chunks
            assert config.chunks <= 256


@pytest.mark.parametrize(
    "module, name, value",
    [
        (torch.backends.cuda.matmul, "allow_tf32", True),
        (torch.backends.cuda.matmul, "fp32_precision", "tf32"),
        (torch.backends, "fp32_precision", "tf32"),
    ],
)
def test_precision_is_torchs_choice(module, name, value):
    """However it was made."""
    assert [_gemm.precision(dtype) for dtype in _launch.DTYPES] == ["half", "half", "ieee"]
    setattr(module, name, value)
    try:
        assert [_gemm.precision(dtype) for dtype in _launch.DTYPES] == ["half", "half", "tf32"]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.fp32_precision = torch.backends.fp32_precision = "none"
    assert not torch.backends.cuda.matmul.allow_tf32


def test_the_cases_of_bench_gpu_reach_every_launch():
    reached, every = set(), set()
    for case in TRITON.cases():
        size, kind = case.levels, "ieee" if case.levels["dtype"] == "f32" else "half"
        M, E, F = torch.Size(size["rows"]).numel(), size["e"], size["f"]
        Eo = E if size["eo"] == "same" else size["eo"]
        if size["layout"] != "contiguous" or M == 0:
            continue
        at = {"kind": kind, "aligned": math.gcd(E, F, Eo) % 8 == 0, "capability": (9, 0)}
        launches = {
            ("rows", _gemm.pick_config(M, Eo, **at)),
            ("weights", _gemm.pick_split(F, E, M, **at)),
            ("fwd", ffn_fwd.pick_config(M, F, gated=size["gate"], **at)),
            ("bwd", ffn_bwd.pick_config(M, F, plain=not size["gate"] and size["dropout_p"] == 0.0, **at)),
        }
        reached |= {(what, kind, c.block_m, c.block_n, c.splits > 1, at["aligned"]) for what, c in launches}
    for kind in ("half", "ieee"):
        for aligned in (True, False):
            tiles = lambda found: {(c.block_m, c.block_n) for c in found}
            gemm = tiles(_gemm.candidates(kind, aligned, 9))
            fwd = {t for gated in (False, True) for t in tiles(ffn_fwd.candidates(kind, gated, aligned, 9))}
            bwd = {t for plain in (False, True) for t in tiles(ffn_bwd.candidates(kind, plain, aligned, 9))}
            every |= {("rows", kind, *t, False, aligned) for t in gemm} | {
                ("fwd", kind, *t, False, aligned) for t in fwd
            }
            every |= {("bwd", kind, *t, False, aligned) for t in bwd}
            cut = _gemm.pick_split(64, 64, 10**6, kind, aligned, (9, 0))
            every.add(("weights", kind, cut.block_m, cut.block_n, True, aligned))
    assert every <= reached, f"launches that no case of the proof makes: {every - reached}"


def test_a_timed_case_is_proven_with_its_own_launches():
    for case in TRITON.speed.cases:
        tiles = []
        for rows in (case.rows, TRITON.speed.proof(case).rows):
            at = {"kind": "half", "aligned": True, "capability": (9, 0)}
            launches = (
                _gemm.pick_config(rows, case.width, **at), _gemm.pick_split(case.hidden, case.width, rows, **at),
                ffn_fwd.pick_config(rows, case.hidden, gated=case.gated, **at),
                ffn_bwd.pick_config(rows, case.hidden, plain=not case.gated and case.dropout_p == 0.0, **at),
            )  # fmt: skip
            tiles.append([(c.block_m, c.block_n, c.num_warps, c.splits > 1) for c in launches])
        assert tiles[0] == tiles[1], case.label


def random_matrix(rng, rows, columns, dtype):
    """Rows of any stride and any start."""
    stride, start = columns + rng.choice((0, 0, 8, 5)), rng.choice((0, 0, 8, 1))
    return torch.empty(start + stride * rows, dtype=dtype)[start:].as_strided((rows, columns), (stride, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_compilations_are_bounded(dtype, gated, compilations, monkeypatch):
    """1,000 random calls of one kind are bound as Triton binds them, through the launchers."""
    monkeypatch.setattr(_launch, "MULTIPROCESSORS", {9: 4})  # every launch of pick_config at sizes that cost nothing
    rng, seed = random.Random(1), torch.tensor(5)
    for number in range(1000):
        size = lambda most: rng.choice((rng.randrange(1, most), 8 * rng.randrange(1, most // 8)))
        rows, width, hidden, out = rng.choice((1, size(1500), size(300))), size(300), size(700), size(300)
        shapes = (rows, width), (hidden, width), (out, hidden), (hidden, width), (rows, out)
        x, w1, w2, gate, dy = (random_matrix(rng, *shape, dtype) for shape in shapes)
        b1, b2, p = torch.empty(hidden, dtype=dtype), torch.empty(out, dtype=dtype), rng.choice((0.1, 0.5, 1.0))
        gate = gate if gated else None
        saved = number % 2 == 0
        _, preact = ffn_fwd.ffn_fwd(x, w1, b1, w2, b2, gate, 1, p, seed, None, True)
        preact = preact if saved else preact[:0, 0]
        ffn_bwd.ffn_bwd(dy, x, w1, b1, w2, gate, preact, 1, p, seed, None, *(True,) * 5, gated)
    counts = {name: len(keys) for name, keys in compilations.items()}
    assert counts["ffn_fwd_kernel"] <= ffn_fwd.MAX_COMPILATIONS and counts["ffn_bwd_kernel"] <= ffn_bwd.MAX_COMPILATIONS
    assert counts["sum_rows_kernel"] <= 3 * _sums.MAX_COMPILATIONS, counts  # of parts, of dy in one run and in several
    kinds = 4 if gated else 3  # y and p with a bias, g without; dx; the weights' gradients
    assert counts["gemm_kernel"] <= kinds * _gemm.MAX_COMPILATIONS, counts
