"""patch() of an nn.Sequential: which neighbours are a feed-forward block, and which only look like one."""

import pytest
import torch
from torch import nn

import tfm_kernels as tfk

OTHERS = {
    "groups": lambda: nn.Conv1d(8, 16, 1, groups=2),
    "padding": lambda: nn.Conv1d(8, 16, 1, padding=1),
    "width": lambda: nn.Conv1d(8, 16, 3),
    "stride": lambda: nn.Conv1d(8, 16, 1, stride=2),
}


@pytest.mark.parametrize("name", OTHERS)
def test_convolutions_that_are_no_linear_layers_stay(name):
    model, x = nn.Sequential(OTHERS[name](), nn.ReLU(), nn.Conv1d(16, 8, 1)), torch.randn(2, 8, 6)
    wanted = model(x)
    with tfk.patch(model):
        assert torch.equal(model(x), wanted)


def test_a_watched_dropout_is_called():
    model, seen = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 8)), []
    with tfk.patch(model):
        model[2].register_forward_hook(lambda *given: seen.append(given))
        model(torch.randn(3, 8))
    assert len(seen) == 1
