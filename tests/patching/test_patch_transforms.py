"""Forward mode and second derivatives of patched models of transformers, whose own eager attention has them."""

import copy

import pytest
import torch
from torch.func import functional_call, grad, jvp

import tfm_kernels as tfk
from tests.patching import test_patch_families as families
from tests.patching.models import albert, assert_as_exact, batch, bert, distilbert


def build(kind):
    model = {"bert": bert, "distilbert": distilbert, "albert": albert}.get(kind, lambda: families.build(kind))()
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


def differentiated(model, run, mode):
    """What comes out, or the gradients of all parameters, and in each mode its derivative along one direction."""
    whole = Run(model, run)
    parameters = {name: p.detach() for name, p in whole.named_parameters()}
    torch.manual_seed(3)
    direction = {name: torch.randn(p.shape, dtype=torch.float64).to(p) / 8 for name, p in parameters.items()}

    def output(given):
        return {"output": functional_call(whole, given, ())}

    def loss(given):
        y = functional_call(whole, given, ())
        return (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(y)).sum()

    def along(given):
        return sum((g * direction[name]).sum() for name, g in grad(loss)(given).items())

    if mode == "reverse over reverse":
        found = grad(along)(parameters)
    else:
        values, tangents = jvp(output if mode == "forward" else grad(loss), (parameters,), (direction,))
        found = values | {f"along {name}": t for name, t in tangents.items()}
    return {name: t.double() for name, t in found.items()}


@pytest.mark.parametrize("mode", ["forward", "forward over reverse", "reverse over reverse"])
@pytest.mark.parametrize("kind", ["bert", "distilbert", "albert", "gpt2", "llama", "bart", "t5", "vit"])
def test_derivatives(kind, mode):
    """With padding, causal or not, with a bias that learns, and with heads in groups."""
    model, run = build(kind), run_of(kind)
    exact = differentiated(copy.deepcopy(model).double(), run, mode)
    stock = differentiated(model, run, mode)
    with tfk.patch(model) as report:
        given = differentiated(model, run, mode)
        assert report.fallbacks == {}
    assert_as_exact(given, stock, exact)
