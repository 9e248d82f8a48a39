"""prove() in 16 bits: a wrong row of an output fails, however many or large the others are; honest rows pass."""

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from tfm_kernels.proof import prove_patched
from tfm_kernels.proof.rule import Judge

DTYPES = [torch.bfloat16, torch.float16]


class Tokens(nn.Module):
    """Two layers, token by token; the first token of each text is a thousand times as large as the others."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24, bias=False)

    def forward(self, x):
        return x + self.second(self.first(x).tanh())


def inputs():
    x = torch.randn(4, 50, 24, generator=torch.Generator().manual_seed(1))
    x[:, 0] *= 1000.0
    return x


def wrong(change):
    class Wrong(Tokens):
        def forward(self, x):
            y = super().forward(x)
            other = torch.zeros_like(y)
            other[2, 7] = (change(y) - y)[2, 7].detach()
            return y + other

    return lambda model: setattr(model, "__class__", Wrong)


DEFECTS = {
    "zeros": lambda y: y * 0.0,
    "another token's": lambda y: y.roll(1, 1),
    "doubled": lambda y: y * 2.0,
    "half as large again": lambda y: y * 1.5,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("change", DEFECTS.values(), ids=DEFECTS)
def test_a_wrong_row_behind_large_ones_fails(change, dtype):
    report = prove_patched(Tokens().eval(), inputs(), dtype=dtype, patch=wrong(change))
    failed = [row for row in report.failures if row.kind == "output"]
    assert {row.rule for row in failed} == {"row"}, "the rule of the whole tensor does not see it"
    assert all(row.detail == "row (2, 7)" for row in failed) and "worst row" in report.table()
    assert prove_patched(Tokens().eval(), inputs(), dtype=dtype, patch=lambda model: None).passed


def judged(truth, noise, patched, dtype=torch.bfloat16):
    """The failures of a tensor whose original errs by ``noise``."""
    found = Judge(dtype, 1.05).compare(
        "output", {"y": truth}, {"y": truth + noise}, {"y": patched}, module="", by_row=True
    )
    return {row.rule for row in found if not row.passed}


def test_a_wrong_row_among_many_fails():
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(30_000, 16, generator=generator, dtype=torch.float64)
    truth, noise, other = draw(), 0.03 * draw(), 0.03 * draw()
    assert judged(truth, noise, truth + other) == set()
    lost = (truth + other).index_fill_(0, torch.tensor(12_345), 0.0)
    assert judged(truth, noise, lost) == {"row"}


@pytest.mark.parametrize("columns", [1, 2, 3, 8, 256])
def test_rows_of_any_length_scatter_without_a_false_alarm(columns):
    """1,000 rows of normal errors, 20 times; sizes over four orders of magnitude."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        draw = lambda size=columns, g=generator: torch.randn(1000, size, generator=g, dtype=torch.float64)
        scale = 100.0 ** draw(1).clamp(-2.0, 2.0)
        truth = draw() * scale
        noise, other = (0.01 * draw() * truth.norm(dim=-1, keepdim=True) / columns**0.5 for _ in range(2))
        found = Judge(torch.bfloat16, 1.05).compare(
            "output", {"y": truth}, {"y": truth + noise}, {"y": truth + other}, module="", by_row=True
        )
        assert [row for row in found if row.rule == "row" and row.passed], found


@pytest.mark.parametrize(("dtype", "unit"), [(torch.float32, 2.0**-24), (torch.bfloat16, 2.0**-8)], ids=str)
def test_errors_that_are_not_rounding_fail(dtype, unit):
    """3 times PyTorch's in float32, of which twice are allowed; 1.4 times in 16 bits, of which 1.05 are."""
    generator = torch.Generator().manual_seed(0)
    truth, noise, other = torch.randn(3, 400, 300, generator=generator, dtype=torch.float64)
    many, few = (3.0, 1.8) if dtype == torch.float32 else (1.4, 1.0)
    assert "size" in judged(truth, noise * unit, truth + many * other * unit, dtype)
    assert judged(truth, noise * unit, truth + few * other * unit, dtype) == set()


def test_float64_is_exact_to_its_roundings():
    truth = torch.randn(40, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert "size" in judged(truth, 0.0 * truth, truth * (1.0 + 1e-9), torch.float64)
    assert judged(truth, 0.0 * truth, truth * (1.0 + 1e-15), torch.float64) == set()


def test_rows_that_are_zero_or_exact():
    truth = torch.randn(6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = torch.zeros(6, 8, dtype=torch.float64)
    assert judged(truth, exact, truth * (1.0 + 2.0**-10)) == set()
    padded = truth.index_fill(0, torch.tensor([4, 5]), 0.0)
    assert judged(padded, exact, padded) == set()
    assert "row" in judged(padded, exact, truth)
    assert judged(padded * 0.0, exact, padded * 0.0) == set()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_judged_of_the_outputs_of_the_model_and_of_each_module(dtype):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    padding = torch.arange(20) >= torch.tensor([20, 7, 13, 1]).unsqueeze(1)
    given = {"src": torch.randn(4, 20, 32), "src_key_padding_mask": padding}
    report = tfk.prove(model, given, dtype=dtype)
    assert report.passed, report.table()
    judged = {(row.kind, row.module) for row in report.rows if row.rule == "row"}
    assert judged >= {("output", ""), ("module", "layers.0"), ("module", "layers.1.norm2")}
    assert not any(row.rule == "row" for row in tfk.prove(model, given).rows)
