"""How int8_ffn's Triton kernels are launched, and how often that compiles them: no GPU needed."""

import random

import pytest
import torch

from bench.gpu.int8_ffn import TRITON
from tests.aot.test_ffn_launches import CAPABILITIES, random_matrix
from tests.aot.test_int8_linear_launches import SIZES
from tests.ops.test_int8_ffn import ACTIVATIONS
from tfm_kernels.triton import _gemm, _int8, _int8_gemm, _launch, int8_ffn_fwd
from tfm_kernels.triton._gemm import Config

WAYS = (False, True)  # gated


def test_launches():
    """Every tile has a program, no program is without one, and every k belongs to one part."""
    for capability in CAPABILITIES:
        for gated in WAYS:
            for aligned in (True, False):
                for M, F, E in SIZES:
                    config = int8_ffn_fwd.pick_config(M, F, E, gated, aligned, capability)
                    assert 1 <= config.programs <= min(2 * 148, _gemm.tiles(M, F, config) * config.splits)
                    assert (M <= _int8_gemm.FEW) == (config.block_m == _int8_gemm.FEW) and config.num_warps in (4, 8)
                    count, part = _int8_gemm.cut(config, E)
                    assert part % config.block_k == 0
                    assert count <= config.splits and (count - 1) * part < max(E, 1) <= count * part


def test_a_gpu_is_filled_by_few_rows():
    """132 multiprocessors, each with its share of the weights."""
    for gated in WAYS:
        for M in (1, 4, 16):
            for F, E in ((11008, 4096), (4096, 1024), (14336, 4096), (2048, 2048)):
                config = int8_ffn_fwd.pick_config(M, F, E, gated, True, (9, 0))
                assert _gemm.tiles(M, F, config) * _int8_gemm.cut(config, E)[0] >= 132, (M, F, E)
                assert config.programs >= 132


def test_launches_of_an_h200():
    at = {"aligned": True, "capability": (9, 0)}
    assert int8_ffn_fwd.pick_config(1, 11008, 4096, True, **at) == Config(16, 64, 128, 4, 4, 172)
    assert int8_ffn_fwd.pick_config(16, 3072, 768, False, **at) == Config(16, 64, 128, 4, 4, 240, splits=5)
    assert int8_ffn_fwd.pick_config(8192, 4096, 1024, False, **at) == Config(256, 128, 128, 8, 3, 132)
    assert int8_ffn_fwd.pick_config(8192, 11008, 4096, True, **at) == Config(128, 64, 128, 8, 3, 132)


def launches(M, E, F, Eo, gated):
    """What a call of these sizes is launched with on an H200, but for how many programs there are."""
    aligned = E % 16 == 0, F % 16 == 0
    first = int8_ffn_fwd.pick_config(M, F, E, gated, aligned[0], (9, 0))
    second = _int8_gemm.pick_config(M, Eo, F, "int8", aligned[1], (9, 0))
    found = (("first", gated, aligned[0], first, E), ("second", False, aligned[1], second, F))
    return {(*words, c.block_m, c.block_n, _int8_gemm.cut(c, K)[0] > 1) for *words, c, K in found}


def test_the_cases_of_bench_gpu_reach_every_launch():
    """And every activation, gated and not."""
    reached, ends = set(), set()
    for case in TRITON.cases():
        size = case.levels
        ends.add((size["activation"], size["gate"]))
        if size["layout"] == "contiguous":
            M = torch.Size(size["rows"]).numel()
            reached |= launches(M, size["e"], size["f"], size["eo"], size["gate"])
    for product, gated in (("first", False), ("first", True), ("second", False)):
        for aligned in (True, False):
            found = int8_ffn_fwd.candidates(gated, aligned, 9)
            every = {(product, gated, aligned, c.block_m, c.block_n, False) for c in found}
            every |= {(product, gated, aligned, c.block_m, c.block_n, True) for c in found[-2:]}
            assert every <= reached, f"launches that no case of the proof makes: {every - reached}"
    assert ends == {(name, gated) for name in ACTIVATIONS for gated in WAYS}


def test_a_timed_case_is_proven_with_its_own_launches():
    for case in TRITON.speed.cases:
        timed, proven = (
            launches(one.rows, one.width, one.hidden, one.width, one.gated) for one in (case, TRITON.speed.proof(case))
        )
        assert timed == proven, case.label


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("gated", WAYS)
def test_compilations_are_bounded(dtype, gated, compilations, monkeypatch):
    """1,000 random calls of one kind are bound as Triton binds them, through the launchers."""
    monkeypatch.setattr(_launch, "MULTIPROCESSORS", {9: 4})  # every launch of pick_config at sizes that cost nothing
    rng = random.Random(1)
    for _ in range(1000):
        size = lambda most: rng.choice((rng.randrange(1, most), 16 * rng.randrange(1, most // 16)))
        rows, width = rng.choice((1, 9, size(1500), size(300))), rng.choice((size(300), size(3000)))
        hidden, out = rng.choice((size(900), size(5000))), size(300)
        x, w1 = random_matrix(rng, rows, width, dtype), random_matrix(rng, hidden, width, torch.int8)
        w2 = random_matrix(rng, out, hidden, torch.int8)
        gate = random_matrix(rng, hidden, width, torch.int8) if gated else None
        steps = torch.empty(hidden)
        b1, b2 = torch.empty(hidden, dtype=dtype), torch.empty(out, dtype=dtype)
        given = x, w1, steps, b1, w2, torch.empty(out), b2, gate, steps if gated else None
        int8_ffn_fwd.int8_ffn_fwd(*given, rng.choice((1, 1, 3)), True)
    counts = {name: len(keys) for name, keys in compilations.items()}
    whole, cut = int8_ffn_fwd.MAX_COMPILATIONS - 4, 4  # for each of the two activations, and for both
    assert counts["int8_ffn_fwd_kernel"] <= 2 * whole + cut, counts
    assert counts["int8_ffn_fwd_join_kernel"] <= 2 * int8_ffn_fwd.MAX_JOIN_COMPILATIONS, counts
    assert counts["int8_gemm_kernel"] <= _int8_gemm.MAX_COMPILATIONS, counts
    assert counts["int8_gemm_join_kernel"] <= _int8_gemm.MAX_JOIN_COMPILATIONS, counts
    assert counts["round_rows_kernel"] <= _int8.MAX_COMPILATIONS, counts
    assert counts["round_pieces_kernel"] <= _int8.MAX_PIECES_COMPILATIONS, counts


def moved(t):
    """The same shape, 4 bytes behind a multiple of 16."""
    step = 4 // t.element_size()
    return torch.zeros(t.numel() + step, dtype=t.dtype)[step:].view(t.shape)


NAMES = ("x", "w1", "scale1", "b1", "w2", "scale2", "b2", "gate", "gate_scale")
CLAIMS = {"int8_ffn_fwd_kernel": ("ALIGNED", "F_ALIGNED"), "int8_gemm_kernel": ("ALIGNED", "Y_ALIGNED")}
# argument -> which of these four claims it takes away
LOST = {"w1": 0, "gate": 0, "scale1": 1, "b1": 1, "gate_scale": 1, "w2": 2, "scale2": 3, "b2": 3}


@pytest.mark.parametrize("name", [None, *LOST])
def test_what_is_not_aligned_is_not_said_to_be(name, told):
    weight, vector = torch.zeros(64, 64, dtype=torch.int8), torch.ones(64)
    given = dict.fromkeys(NAMES, vector) | {"x": torch.zeros(32, 64)} | dict.fromkeys(("w1", "w2", "gate"), weight)
    if name is not None:
        given[name] = moved(given[name])
    int8_ffn_fwd.int8_ffn_fwd(*given.values(), 1, True)
    launched = {kernel.fn.__name__: dict(zip(kernel.arg_names, values, strict=True)) for kernel, _, values, _ in told}
    claims = [bool(launched[kernel][word]) for kernel, words in CLAIMS.items() for word in words]
    assert claims == [LOST.get(name) != number for number in range(4)]
