"""What every way to run Triton's activations is asked: few units of 1 from float64, whether EXACT or not."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from tfm_kernels._library import ACTIVATIONS
from tfm_kernels.triton._activation import activate, activate_and_slope

TORCH = {"relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda p: F.gelu(p, approximate="tanh"), "silu": F.silu}
UNIT = 2.0**-24


@triton.jit
def activations_kernel(p_ptr, value_ptr, again_ptr, slope_ptr, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):
    offs = tl.program_id(0) * 128 + tl.arange(0, 128)
    p = tl.load(p_ptr + offs)
    tl.store(value_ptr + offs, activate(p, ACTIVATION, EXACT))
    value, slope = activate_and_slope(p, ACTIVATION, EXACT)
    tl.store(again_ptr + offs, value)
    tl.store(slope_ptr + offs, slope)


def assert_activation(name, exact):
    """From far below 0 to far above, and what is no number.

    Args:
        name: of ACTIVATIONS.
        exact: EXACT.
    """
    dense = torch.cat([torch.linspace(-20, 20, 8001), torch.logspace(-30, 30, 241), -torch.logspace(-30, 30, 241)])
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    p = torch.cat([dense, special, torch.zeros(-(len(dense) + len(special)) % 128)]).float()
    value, again, slope = (torch.empty_like(p) for _ in range(3))
    activations_kernel[(len(p) // 128,)](p, value, again, slope, ACTIVATIONS.index(name), exact)
    wide = p.double().requires_grad_()
    expected = TORCH[name](wide)
    (expected_slope,) = torch.autograd.grad(expected.sum(), wide)
    finite = expected.isfinite() & expected_slope.isfinite()
    size = p.double().abs().clamp(min=1.0)
    for found in (value, again):
        assert torch.equal(found.isnan(), expected.isnan())
        assert (found.double() - expected).abs()[finite].le(8 * UNIT * size[finite]).all(), "a value is wrong"
    assert (slope.double() - expected_slope).abs()[finite].le(16 * UNIT * size.clamp(max=8.0)[finite]).all(), "a slope"
    assert finite.sum() > 8000
