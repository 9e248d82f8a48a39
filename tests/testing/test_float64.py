"""The judge of whole models in float64: roundings pass; mistakes and float32 are caught."""

import pytest
import torch

from tfm_kernels.testing import ContractError
from tfm_kernels.testing.float64 import assert_same_in_float64

X = torch.linspace(0.5, 2.0, 7, dtype=torch.float64)


def test_roundings_pass():
    assert_same_in_float64(X * (1 + 2**-45), X)


@pytest.mark.parametrize("found", [X * (1 + 1e-8), (X / 3).float().double() * 3, X[:-1]], ids=["far", "f32", "shape"])
def test_mistakes_are_caught(found):
    with pytest.raises(AssertionError, match="scores: "):
        assert_same_in_float64(found, X, "scores")


def test_float32_is_refused():
    with pytest.raises(ContractError, match="scores: must be computed in float64, got torch.float32 and torch.float64"):
        assert_same_in_float64(X.float(), X, "scores")
