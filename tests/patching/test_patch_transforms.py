"""torch.func and forward-mode differentiation on patched models of transformers, whose own eager attention has them."""

import copy

import pytest
import torch
from torch.func import functional_call, grad, jvp

import tfm_kernels as tfk
from tests.patching import test_patch_families as families
from tests.patching.models import assert_as_exact, batch, bert, distilbert


def build(kind):
    model = {"bert": bert, "distilbert": distilbert}.get(kind, lambda: families.build(kind))()
    model.set_attn_implementation("eager")
    return model


def run_of(kind):
    ids, mask = batch()
    if kind in families.MODELS:
        return families.run_of(kind)
    return lambda m: m(ids, attention_mask=mask).last_hidden_state[mask.bool()]


class Run(torch.nn.Module):
    """A model and what is asked of it, for functional_call."""

    def __init__(self, model, run):
        super().__init__()
        self.model, self.run = model, run

    def forward(self):
        return self.run(self.model)


def tangents(model, run, reverse):
    """What comes out, or with ``reverse`` the gradients of all parameters, and its derivative along one direction."""
    whole = Run(model, run)
    parameters = {name: p.detach() for name, p in whole.named_parameters()}
    torch.manual_seed(3)
    direction = {name: torch.randn(p.shape, dtype=torch.float64).to(p) / 8 for name, p in parameters.items()}

    def output(given):
        return {"output": functional_call(whole, given, ())}

    def loss(given):
        y = functional_call(whole, given, ())
        return (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(y)).sum()

    function = grad(loss) if reverse else output
    values, along = jvp(function, (parameters,), (direction,))
    return {k: v.double() for k, v in values.items()} | {f"along {k}": v.double() for k, v in along.items()}


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "forward over reverse"])
@pytest.mark.parametrize("kind", ["bert", "distilbert", "gpt2", "llama", "bart", "t5", "vit"])
def test_forward_mode(kind, reverse):
    """With padding, causal or not, with a bias that learns, and with heads in groups."""
    model, run = build(kind), run_of(kind)
    exact = tangents(copy.deepcopy(model).double(), run, reverse)
    stock = tangents(model, run, reverse)
    with tfk.patch(model) as report:
        given = tangents(model, run, reverse)
        assert report.fallbacks == {}
    assert_as_exact(given, stock, exact)
