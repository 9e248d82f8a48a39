"""How int8_linear's Triton kernels are launched, and how often that compiles them: no GPU needed."""

import random
from dataclasses import replace

import pytest
import torch

from bench.gpu.int8_linear import TRITON
from tests.aot.test_ffn_launches import CAPABILITIES, random_matrix
from tfm_kernels.triton import _gemm, _int8, _int8_gemm, _launch, int8_linear_fwd
from tfm_kernels.triton._gemm import Config

KINDS = ("half", "ieee", "tf32", "int8")
SIZES = (
    (1, 1, 1),
    (1, 4096, 1024),
    (16, 50257, 768),
    (17, 64, 10**6),
    (300, 129, 65),
    (8192, 4096, 4096),
    (10**6, 9, 9),
)


def test_launches():
    """Every tile has a program, no program is without one, and every k belongs to one part."""
    for capability in CAPABILITIES:
        for kind in KINDS:
            for aligned in (True, False):
                for M, N, K in SIZES:
                    config = _int8_gemm.pick_config(M, N, K, kind, aligned, capability)
                    assert 1 <= config.programs <= min(2 * 148, _gemm.tiles(M, N, config) * config.splits)
                    assert config.num_warps in (4, 8) and (
                        config.splits == 1 or K >= config.splits * _int8_gemm.LEAST_K
                    )
                    count, part = _int8_gemm.cut(config, K)
                    assert part % config.block_k == 0
                    assert count <= config.splits and (count - 1) * part < max(K, 1) <= count * part
                    assert (M <= _int8_gemm.FEW) == (config.block_m == _int8_gemm.FEW) or kind == "ieee" and not aligned


def test_a_gpu_is_filled_by_few_rows():
    """132 multiprocessors, each with its share of the weights."""
    for kind in ("half", "int8"):
        for M in (1, 4, 16):
            for N, K in ((1024, 4096), (4096, 1024), (4096, 4096), (8000, 512), (11008, 4096), (50257, 768)):
                config = _int8_gemm.pick_config(M, N, K, kind, True, (9, 0))
                assert _gemm.tiles(M, N, config) * _int8_gemm.cut(config, K)[0] >= 132, (M, N, K)
                assert config.programs >= 132


def test_launches_of_an_h200():
    at = {"aligned": True, "capability": (9, 0)}
    assert _int8_gemm.pick_config(1, 4096, 1024, "half", **at) == Config(16, 64, 128, 4, 4, 256, splits=4)
    assert _int8_gemm.pick_config(8192, 4096, 1024, "half", **at) == Config(256, 128, 64, 8, 3, 132)
    assert _int8_gemm.pick_config(8192, 4096, 1024, "int8", **at) == Config(256, 128, 128, 8, 3, 132)
    assert _int8.pick_config(768) == _int8.Config(1, 1024) and _int8.pick_config(100) == _int8.Config(4, 256)


def launch(M, K, N, dtype, dynamic):
    """What a call of these sizes is launched with on an H200, but for how many programs there are."""
    kind, aligned = "int8" if dynamic else "ieee" if dtype == "f32" else "half", K % 16 == 0
    config = _int8_gemm.pick_config(M, N, K, kind, aligned, (9, 0))
    return kind, aligned, config.block_m, config.block_n, _int8_gemm.cut(config, K)[0] > 1


def test_the_cases_of_bench_gpu_reach_every_launch():
    reached = set()
    for case in TRITON.cases():
        size = case.levels
        if size["layout"] == "contiguous":
            M = torch.Size(size["rows"]).numel()
            reached.add(launch(M, size["k"], size["n"], size["dtype"], size["dynamic"]))
    for kind in ("half", "ieee", "int8"):
        for aligned in (True, False):
            found = _int8_gemm.candidates(kind, aligned, 9)
            every = {(kind, aligned, c.block_m, c.block_n, False) for c in found}
            every |= {(kind, aligned, c.block_m, c.block_n, True) for c in found[-2:]}
            assert every <= reached, f"launches that no case of the proof makes: {every - reached}"


def test_a_timed_case_is_proven_with_its_own_launch():
    words = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
    for case in TRITON.speed.cases:
        proof = TRITON.speed.proof(case)
        for dtype in case.dtypes:
            timed, proven = (
                launch(one.rows, one.width, one.out, words[dtype], one.dynamic) for one in (case, proof)
            )  # fmt: skip
            assert timed == proven, case.label
        assert replace(case, rows=proof.rows, out=proof.out) == proof


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compilations_are_bounded(dtype, dynamic, compilations, monkeypatch):
    """1,000 random calls of one kind are bound as Triton binds them, through the launchers."""
    monkeypatch.setattr(_launch, "MULTIPROCESSORS", {9: 4})  # every launch of pick_config at sizes that cost nothing
    rng = random.Random(1)
    for _ in range(1000):
        size = lambda most: rng.choice((rng.randrange(1, most), 16 * rng.randrange(1, most // 16)))
        rows, width, out = rng.choice((1, 9, size(1500), size(300))), rng.choice((size(300), size(6000))), size(900)
        x, weight = random_matrix(rng, rows, width, dtype), random_matrix(rng, out, width, torch.int8)
        int8_linear_fwd.int8_linear_fwd(x, weight, torch.empty(out), torch.empty(out, dtype=dtype), dynamic)
    counts = {name: len(keys) for name, keys in compilations.items()}
    assert counts["int8_gemm_kernel"] <= _int8_gemm.MAX_COMPILATIONS, counts
    assert counts["int8_gemm_join_kernel"] <= _int8_gemm.MAX_JOIN_COMPILATIONS, counts
    assert counts.get("round_rows_kernel", 0) <= _int8.MAX_COMPILATIONS and dynamic == ("round_rows_kernel" in counts)
