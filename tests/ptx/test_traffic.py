"""What the memory accesses of compiled kernels cost, counted."""

import pytest
import torch

import tfm_kernels as tfk
from tfm_kernels.triton.layer_norm_bwd import pick_config

ATTENTION = ("attention_fwd_kernel", "attention_bwd_keys_kernel", "attention_bwd_queries_kernel")


def heads(width):
    """q, k and v that lie token by token."""
    return (torch.randn(1, 256, 2, width, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(3))


def traffic(machine, call):
    """Kernel -> Traffic of the launches of a call, forward and, where it has one, backward."""
    machine.begin(count=True)
    out = call()
    if out.requires_grad:
        out.backward(torch.randn_like(out))
    return machine.traffic


def assert_banks_are_free(name, counted, most=1.1):
    """No two words of one bank but a few where sums of rows meet."""
    assert 0 < counted.shared_waves <= most * counted.shared_least or counted.shared_least == 0, name


def assert_little_is_lost(name, counted, most=1.1, lost=0):
    """Whole sectors but for ``lost`` bytes, and no two words of one bank."""
    assert 32 * counted.global_sectors - lost <= 1.05 * counted.global_bytes, name
    assert_banks_are_free(name, counted, most)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [64, 512, 1024, 2048])
def test_norms(width, dtype, machine, backend, rows=300):
    x, weight = (torch.randn(n, dtype=dtype).requires_grad_() for n in ((rows, width), (width,)))
    found = traffic(machine, lambda: tfk.ops.layer_norm(x, weight, weight, backend=backend))
    # csrc/cuda: a warp writes two floats of its row, alone in their sectors
    statistics = 2 * 28 * rows if backend == "cuda" else 0
    for name, counted in found.items():
        if "sum" not in name:
            assert_little_is_lost(name, counted, lost=statistics)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sums_of_long_rows(dtype, cuda):
    """csrc/cuda keeps them in memory; Triton's, of two instructions a pack, ask for a sector twice."""
    test_norms(16384, dtype, cuda.machine, "cuda", rows=40)


@pytest.mark.parametrize("width, most", [(512, (17, 21.2)), (1024, (18, 23)), (4096, (19, 23))])
def test_instructions_of_norms(width, most, gpu):
    """What a GPU's schedulers can issue while its memory moves an element of 16 bits is some 27, backward 41."""
    found, weight = [], torch.randn(width, dtype=torch.bfloat16).requires_grad_()
    config = pick_config(10**6, width, True, (9, 0))
    rows = config.programs * config.block_m
    for times in (1, 2):
        x = torch.randn(times * rows, width, dtype=torch.bfloat16).requires_grad_()
        counted = traffic(gpu, lambda x=x: tfk.ops.layer_norm(x, weight, weight, backend="triton"))
        found.append([counted[f"layer_norm_{direction}_kernel"].issued for direction in ("fwd", "bwd")])
    each = [32 * (twice - once) / (rows * width) for once, twice in zip(*found, strict=True)]
    assert all(0 < issued <= limit for issued, limit in zip(each, most, strict=True)), each


@pytest.mark.parametrize("width", [64, 128])
def test_attention(width, machine, backend):
    q, k, v = heads(width)
    found = traffic(machine, lambda: tfk.ops.attention(q, k, v, tfk.Mask.causal(), dropout_p=0.1, backend=backend))
    for name in ATTENTION:
        assert_little_is_lost(name, found[name])


@pytest.mark.parametrize(
    "width, dtype, arch",
    [
        (64, torch.bfloat16, 90),
        (64, torch.float32, 90),
        (128, torch.bfloat16, 90),
        pytest.param(64, torch.float32, 80, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_attention_with_bias(width, dtype, arch, gpu):
    """A bias with a gradient, of the type of the heads or float32."""
    q, k, v = heads(width)
    bias = torch.randn(1, 2, 256, 256, dtype=dtype).requires_grad_()
    found = traffic(gpu, lambda: tfk.ops.attention(q, k, v, bias=bias, backend="triton"))
    for name in ATTENTION:
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


def test_sums_of_rows(gpu):
    """What a second kernel adds up: parts of the keys, classes or rows."""
    query, key = (torch.randn(1, 2, n, 128, dtype=torch.bfloat16) for n in (1, 512))
    x, w1, w2, bias = (torch.randn(s, dtype=torch.bfloat16) for s in ((300, 64), (64, 64), (64, 64), 64))
    target = torch.randint(64, (300,))
    calls = {
        "attention_fwd_merge_kernel": lambda: tfk.ops.attention(query, key, key, backend="triton"),
        "sum_rows_kernel": lambda: tfk.ops.ffn(x, w1, None, w2, bias.requires_grad_(), backend="triton"),
        "linear_cross_entropy_fwd_join_kernel": lambda: tfk.ops.linear_cross_entropy(
            x, w1, target, label_smoothing=0.1, reduction="none", backend="triton"
        ),
    }
    for name, call in calls.items():
        counted = traffic(gpu, call)[name]
        assert counted.shared_waves > 0, name
        assert_banks_are_free(name, counted)
