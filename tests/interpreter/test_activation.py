"""Triton's activations, interpreted, against float64."""

import pytest

from tests.activation_semantics import assert_activation
from tfm_kernels._library import ACTIVATIONS


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name, exact):
    assert_activation(name, exact)
