"""Triton's activations, as the PTX that a GPU would be given, against float64."""

import pytest

from tests.activation_semantics import assert_activation
from tfm_kernels._library import ACTIVATIONS


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name, exact, gpu):
    assert_activation(name, exact)
    assert gpu.launches
