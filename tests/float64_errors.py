"""How far the outputs and gradients of a call in float32 lie from the same call in float64."""

import torch

from tfm_kernels.testing.contract import run


def frobenius_errors(op, inputs, backend):
    """Name -> |found - exact| / |exact|, as rule C2 measures it; a gradient goes by the name of its argument."""
    exact = {name: t.double() if getattr(t, "dtype", None) == torch.float32 else t for name, t in inputs.items()}
    found = run(op, inputs, backend)
    expected = run(op, exact, "reference", douts={name: dout.double() for name, dout in found.douts.items()})
    pairs = {name: (t, expected.outputs[name]) for name, t in found.outputs.items()}
    pairs |= {name: (t, expected.grads[name]) for name, t in found.grads.items()}
    return {name: ((a.double() - b).norm() / b.norm()).item() for name, (a, b) in pairs.items()}
