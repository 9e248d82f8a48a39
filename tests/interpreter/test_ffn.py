"""ffn's Triton kernels, interpreted: the numeric contract, dropout masks, cut sums, refusals."""

import pytest
import torch

from tests.cases import CASES
from tfm_kernels.testing import contract_report

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEED = torch.tensor(2**40 + 20261121)
FFN = [case for case in CASES if case.op == "ffn" and case.levels["dtype"] != "f64"]


def products(case):
    """Multiplications of the forward, which the interpreter's time follows."""
    size = case.levels
    return torch.Size(size["rows"]).numel() * size["f"] * (size["e"] + 100) * (1 + size["gate"])


def marked(case):
    return pytest.param(case, id=case.id, marks=pytest.mark.slow if products(case) > 3e6 else ())


@pytest.mark.parametrize("case", [marked(case) for case in FFN])
def test_contract(case):
    contract_report(case.op, case.inputs(), "triton", backward=False).raise_broken()
