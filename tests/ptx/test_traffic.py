"""What the memory accesses of compiled kernels cost, counted."""

import pytest
import torch

import tfm_kernels as tfk
from tests.ptx.driver import Traffic

pytestmark = pytest.mark.usefixtures("gpu")


def traffic(machine, call):
    """Kernel -> Traffic of the launches of a call, forward and backward."""
    machine.begin(keep=True)
    out = call()
    out.backward(torch.randn_like(out))
    launches, found = machine.launches, {}
    machine.begin()
    for launch in launches:
        machine.launch(launch, found.setdefault(launch.name, Traffic()))
    return found


def assert_little_is_lost(name, counted):
    """Whole sectors, and no two words of one bank but a few where sums of rows meet."""
    assert 32 * counted.global_sectors <= 1.05 * counted.global_bytes, name
    assert 0 < counted.shared_waves <= 1.1 * counted.shared_least or counted.shared_least == 0, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [64, 512, 1024, 2048])
def test_norms(width, dtype, gpu):
    x, weight = (torch.randn(n, dtype=dtype).requires_grad_() for n in ((300, width), (width,)))
    found = traffic(gpu, lambda: tfk.ops.layer_norm(x, weight, weight, backend="triton"))
    for name in ("layer_norm_fwd_kernel", "layer_norm_bwd_kernel"):
        assert_little_is_lost(name, found[name])


@pytest.mark.parametrize("width", [64, 128])
def test_attention(width, gpu):
    """Of heads that lie token by token."""
    q, k, v = (torch.randn(1, 256, 2, width, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(3))
    found = traffic(gpu, lambda: tfk.ops.attention(q, k, v, tfk.Mask.causal(), dropout_p=0.1, backend="triton"))
    for name in ("attention_fwd_kernel", "attention_bwd_keys_kernel", "attention_bwd_queries_kernel"):
        assert_little_is_lost(name, found[name])


@pytest.mark.parametrize(
    "width, dtype, arch",
    [(64, torch.bfloat16, 90), (64, torch.float32, 90), (128, torch.bfloat16, 90), (64, torch.float32, 80)],
    ids=str,
)
def test_attention_with_bias(width, dtype, arch, gpu):
    """A bias with a gradient, of the type of the heads or float32."""
    q, k, v = (torch.randn(1, 256, 2, width, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(3))
    bias = torch.randn(1, 2, 256, 256, dtype=dtype).requires_grad_()
    found = traffic(gpu, lambda: tfk.ops.attention(q, k, v, bias=bias, backend="triton"))
    for name in ("attention_fwd_kernel", "attention_bwd_keys_kernel", "attention_bwd_queries_kernel"):
        assert_little_is_lost(name, found[name])


@pytest.mark.parametrize("activation, gated", [("gelu", False), ("silu", True)])
def test_ffn(activation, gated, gpu):
    x, w1, w2, gate = (
        torch.randn(s, dtype=torch.bfloat16).requires_grad_() for s in ((256, 256), (512, 256), (256, 512), (512, 256))
    )
    options = {"activation": activation, "gate": gate if gated else None, "dropout_p": 0.1, "backend": "triton"}
    for name, counted in traffic(gpu, lambda: tfk.ops.ffn(x, w1, None, w2, None, **options)).items():
        assert_little_is_lost(name, counted)
