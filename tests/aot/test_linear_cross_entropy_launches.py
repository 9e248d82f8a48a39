"""How linear_cross_entropy's Triton kernels are launched, and how often that compiles them: no GPU needed."""

import random
from dataclasses import replace

import pytest
import torch

from bench.gpu.linear_cross_entropy import TRITON
from tests.aot.test_ffn_launches import CAPABILITIES, KINDS, random_matrix
from tfm_kernels.triton import _cross_entropy, _gemm, _launch, _sums
from tfm_kernels.triton import linear_cross_entropy_bwd as bwd
from tfm_kernels.triton import linear_cross_entropy_fwd as fwd
from tfm_kernels.triton._gemm import Config

SIZES = ((1, 1), (1, 10**6), (64, 50257), (65, 128), (300, 129), (8192, 33708), (10**6, 512), (10**6, 10**6))


def test_launches():
    """Every tile has a program, no program is without one, and every tile of classes belongs to one part."""
    for capability in CAPABILITIES:
        for kind in KINDS:
            for aligned in (True, False):
                for M, V in SIZES:
                    config = fwd.pick_config(M, V, kind, aligned, capability)
                    tiles_m, tiles_v = -(-M // config.block_m), -(-V // config.block_n)
                    run = -(-tiles_v // config.splits)  # as the kernel has it
                    assert config.programs == tiles_m * config.splits and config.num_warps in (4, 8)
                    assert (config.splits - 1) * run < tiles_v <= config.splits * run
                    config = bwd.pick_config(M, V, kind, aligned, capability)
                    assert 1 <= config.programs <= min(2 * 148, _gemm.tiles(M, V, config))


def test_a_gpu_is_filled():
    """By few rows too, and with little left over at the end."""
    for M, V in ((16, 50257), (128, 32000), (512, 30522), (8192, 33708), (20000, 8000)):
        config = fwd.pick_config(M, V, "half", True, (9, 0))
        assert config.programs >= min(fwd.WAVES * 264, -(-V // config.block_n))


def test_launches_of_an_h200():
    """8192 rows of 1024 and 33708 classes."""
    at = {"kind": "half", "aligned": True, "capability": (9, 0)}
    assert fwd.pick_config(8192, 33708, **at) == Config(128, 128, 64, 4, 3, 64 * 17, splits=17)
    assert bwd.pick_chunk(8192, 33708, 2) == 2048
    assert bwd.pick_config(8192, 2048, **at) == Config(128, 128, 64, 4, 3, 264)


def test_chunks():
    """Within CHUNK_BYTES, in whole tiles, and not more than there is."""
    for M, V in SIZES:
        for itemsize in (2, 4):
            chunk = bwd.pick_chunk(M, V, itemsize)
            assert chunk % bwd.STEP == 0 and chunk < V + bwd.STEP
            assert chunk == bwd.STEP or M * chunk * itemsize <= bwd.CHUNK_BYTES
    for major in (8, 9, 10):
        for kind in KINDS:
            for aligned in (True, False):
                assert all(bwd.STEP % c.block_n == 0 for c in _cross_entropy.candidates(kind, aligned, major))


def launches(M, K, V, dtype, ignored=False):
    """What a call of these sizes is launched with on an H200, but for how many programs there are."""
    kind, itemsize = ("ieee", 4) if dtype == "f32" else ("half", 2)
    at, chunk = {"kind": kind, "aligned": K % 8 == 0, "capability": (9, 0)}, bwd.pick_chunk(M, V, itemsize)
    weights = {("weight", _gemm.pick_split(min(chunk, V - begin), K, M, **at)) for begin in range(0, V, chunk)}
    found = {
        ("fwd", fwd.pick_config(M, V, **at)), ("bwd", bwd.pick_config(M, chunk, **at)),
        ("x", _gemm.pick_split(M, K, chunk, **at)), *weights,
    }  # fmt: skip
    return {(what, kind, K % 8 == 0, c.block_m, c.block_n, what in "xweight" and c.splits > 1) for what, c in found}


def test_the_cases_of_bench_gpu_reach_every_launch():
    reached, every = set(), set()
    for case in TRITON.cases():
        size, M = case.levels, torch.Size(case.levels["rows"]).numel()
        if size["layout"] == "contiguous" and M:
            reached |= launches(M, size["k"], size["v"], size["dtype"])
    for kind in ("half", "ieee"):
        for aligned in (True, False):
            for config in _cross_entropy.candidates(kind, aligned, 9):
                every |= {(what, kind, aligned, config.block_m, config.block_n, False) for what in ("fwd", "bwd")}
            for config in _gemm.candidates(kind, aligned, 9):
                every |= {(what, kind, aligned, config.block_m, config.block_n, False) for what in ("x", "weight")}
            cut = _gemm.pick_split(64, 64, 10**6, kind, aligned, (9, 0))
            every |= {(what, kind, aligned, cut.block_m, cut.block_n, True) for what in ("x", "weight")}
    assert every <= reached, f"launches that no case of the proof makes: {every - reached}"


def test_a_timed_case_is_proven_with_its_own_launches_of_logits():
    for case in TRITON.speed.cases:
        proof = TRITON.speed.proof(case)
        dtype = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[case.dtypes[0]]
        every = [launches(one.rows, one.width, one.classes, dtype) for one in (case, proof)]
        timed, proven = ({found for found in one if found[0] in ("fwd", "bwd")} for one in every)
        assert timed == proven, case.label
        assert replace(case, rows=proof.rows, classes=proof.classes) == proof


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("full", [False, True])
def test_compilations_are_bounded(dtype, full, compilations, monkeypatch):
    """1,000 random calls of one kind are bound as Triton binds them, through the launchers."""
    monkeypatch.setattr(_launch, "MULTIPROCESSORS", {9: 4})  # every launch of pick_config at sizes that cost nothing
    rng = random.Random(1)
    for number in range(1000):
        size = lambda most: rng.choice((rng.randrange(1, most), 8 * rng.randrange(1, most // 8)))
        rows, width, classes = rng.choice((1, size(1500), size(300))), size(300), size(900)
        monkeypatch.setattr(bwd, "CHUNK_BYTES", rng.choice((1, 2**25)))
        x, weight = random_matrix(rng, rows, width, dtype), random_matrix(rng, classes, width, dtype)
        bias, smoothing = torch.empty(classes, dtype=dtype) if full else None, rng.choice((0.1, 1.0)) if full else 0.0
        target, dloss = torch.zeros(rows, 2, dtype=torch.int64)[:, number % 2], torch.zeros(())
        ignored = rng.choice((-100, 0, 2**63 - 1))
        _, lse, *nothing = fwd.linear_cross_entropy_fwd(x, weight, bias, target, ignored, smoothing, *(False,) * 3)
        rest = (target, lse, *nothing, ignored, smoothing, True, True, full)
        bwd.linear_cross_entropy_bwd(dloss.expand(rows), x, weight, bias, *rest)
    counts = {name: len(keys) for name, keys in compilations.items()}
    assert counts["linear_cross_entropy_fwd_kernel"] <= fwd.MAX_COMPILATIONS, counts
    assert counts["linear_cross_entropy_bwd_kernel"] <= bwd.MAX_COMPILATIONS, counts
    assert counts["linear_cross_entropy_fwd_join_kernel"] == 1 and counts["live_rows_kernel"] == 2, counts
    assert counts["gemm_kernel"] <= 2 * _gemm.MAX_COMPILATIONS, counts
    assert counts["sum_rows_kernel"] <= 3 * _sums.MAX_COMPILATIONS, counts
