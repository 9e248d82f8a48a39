"""How much the contract allows: numbers, so that nobody loosens a bound unseen."""

import pytest
import torch

from tfm_kernels.testing.judge import TRUTHS, eager_results, judge
from tfm_kernels.testing.rounding import product_bound


@pytest.mark.parametrize(
    ("dtype", "passes", "fails"), [(torch.bfloat16, 1.0, 1.15), (torch.float32, 1.9, 3.0)], ids=str
)
def test_c2(dtype, passes, fails):
    """Noise makes the error of the whole so many times that of PyTorch."""
    g = torch.Generator().manual_seed(0)
    inputs = {"x": torch.randn(128, 256, generator=g).to(dtype), "weight": torch.randn(256, generator=g).to(dtype)}
    truth = TRUTHS["layer_norm"].expect("layer_norm", inputs, {"y": inputs["x"]}, {})["y"].value
    own = (eager_results("layer_norm", inputs, {}, {})["y"].double() - truth).norm()
    noise = torch.randn(128, 256, generator=g) * truth * own / truth.norm()
    for factor, caught in ((passes, False), (fails, True)):
        tried = ((truth + grown * noise).to(dtype) for grown in torch.arange(0.0, 4.0, 0.01))
        y = next(y for y in tried if (y - truth).norm() >= factor * own)
        report = judge("layer_norm", inputs, {"y": y}, tame=True)
        assert any(found.rule == "C2" for found in report.broken) is caught, report


@pytest.mark.parametrize(
    ("dtype", "units"), [(torch.bfloat16, 2 * 2.0**-8), (torch.float16, 2 * 2.0**-11), (torch.float32, 20 * 2.0**-24)],
    ids=str,
)  # fmt: skip
def test_c1_of_a_product(dtype, units):
    """Of 16 terms: a unit of the storage type for the result and one for chance, or what float32 sums round."""
    one = torch.ones(1, dtype=torch.float64)
    assert float(product_bound(one, one, one, 16, dtype, dtype)) == pytest.approx(units, rel=1e-3)
