"""What the memory accesses of compiled kernels cost, counted."""

import pytest
import torch

import tfm_kernels as tfk


def traffic(machine, call):
    """Kernel -> Traffic of the launches of a call, forward and backward."""
    machine.begin(count=True)
    out = call()
    out.backward(torch.randn_like(out))
    return machine.traffic


def assert_little_is_lost(name, counted, most=1.1, lost=0):
    """Whole sectors but for ``lost`` bytes, and no two words of one bank but a few where sums of rows meet."""
    assert 32 * counted.global_sectors - lost <= 1.05 * counted.global_bytes, name
    assert 0 < counted.shared_waves <= most * counted.shared_least or counted.shared_least == 0, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [64, 512, 1024, 2048])
def test_norms(width, dtype, machine, backend, rows=300):
    x, weight = (torch.randn(n, dtype=dtype).requires_grad_() for n in ((rows, width), (width,)))
    found = traffic(machine, lambda: tfk.ops.layer_norm(x, weight, weight, backend=backend))
    statistics = (
        2 * 28 * rows if backend == "cuda" else 0
    )  # a warp writes two floats of its row, alone in their sectors
    for name, counted in found.items():
        if "sum" not in name:
            assert_little_is_lost(name, counted, lost=statistics)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sums_of_long_rows(dtype, cuda):
    """csrc/cuda keeps them in memory; Triton's, of two instructions a pack, ask for a sector twice."""
    test_norms(16384, dtype, cuda.machine, "cuda", rows=40)


@pytest.mark.parametrize("width", [64, 128])
def test_attention(width, machine, backend):
    """Of heads that lie token by token."""
    q, k, v = (torch.randn(1, 256, 2, width, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(3))
    found = traffic(machine, lambda: tfk.ops.attention(q, k, v, tfk.Mask.causal(), dropout_p=0.1, backend=backend))
    for name in ("attention_fwd_kernel", "attention_bwd_keys_kernel", "attention_bwd_queries_kernel"):
        assert_little_is_lost(name, found[name])


@pytest.mark.parametrize("activation, gated", [("gelu", False), ("silu", True)])
def test_ffn(activation, gated, machine, backend):
    x, w1, w2, gate = (
        torch.randn(s, dtype=torch.bfloat16).requires_grad_() for s in ((256, 256), (512, 256), (256, 512), (512, 256))
    )
    options = {"activation": activation, "gate": gate if gated else None, "dropout_p": 0.1, "backend": backend}
    most = 1.15 if backend == "cuda" else 1.1  # a tile's sums are read from where two rows share a bank, once a tile
    for name, counted in traffic(machine, lambda: tfk.ops.ffn(x, w1, None, w2, None, **options)).items():
        assert_little_is_lost(name, counted, most)
