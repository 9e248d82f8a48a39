"""A module of torch.nn and ours with the same weights, run on the same inputs and compared."""

import copy
import itertools
import warnings

import torch

import tfm_kernels as tfk

BACKENDS = ["reference", "aten", "cpu"]


def randn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pairwise(**choices):
    """Few cases (dicts) in which every pair of values of every two choices occurs at least once. Deterministic."""
    names = list(choices)
    missing = {
        (a, i, b, j)
        for a, b in itertools.combinations(names, 2)
        for i in range(len(choices[a]))
        for j in range(len(choices[b]))
    }
    cases = []
    while missing:
        a, i, b, j = min(missing)
        picked = {a: i, b: j}
        for name in names:
            if name in picked:
                continue

            def gain(k, name=name):
                pairs = ((name, k, other, at) for other, at in picked.items())
                return sum(tuple(ordered(pair, names)) in missing for pair in pairs)

            picked[name] = max(
                range(len(choices[name])), key=lambda k: (gain(k), (k + len(cases)) % len(choices[name]))
            )
        missing -= {(a, picked[a], b, picked[b]) for a, b in itertools.combinations(names, 2)}
        cases.append({name: choices[name][picked[name]] for name in names})
    return cases


def ordered(pair, names):
    a, i, b, j = pair
    return (a, i, b, j) if names.index(a) < names.index(b) else (b, j, a, i)


def label(case):
    return "-".join(f"{name}={getattr(value, '__name__', value)}".replace("torch.", "") for name, value in case.items())


def twins(name, *args, backend, **kwargs):
    """(torch's, ours): the same arguments, the same start, then the same random weights, exchanged both ways."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's stacks warn that they cannot nest tensors
        torch.manual_seed(1)
        theirs = getattr(torch.nn, name)(*args, **kwargs)
        after = torch.random.get_rng_state()
        torch.manual_seed(1)
        ours = getattr(tfk.nn, name)(*args, **kwargs, backend=backend)
    assert isinstance(ours, type(theirs))
    assert torch.equal(after, torch.random.get_rng_state())
    assert list(theirs.state_dict()) == list(ours.state_dict())
    for a, b in zip(theirs.state_dict().values(), ours.state_dict().values(), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    for seed, parameter in enumerate(ours.parameters()):
        parameter.data.copy_(randn(*parameter.shape, seed=100 + seed) * 0.3)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


def results(module, inputs, **options):
    """Every output and every gradient of a random functional of the outputs: {name: tensor}."""
    module.zero_grad()
    leaves = {}
    for tensor in inputs:  # one leaf for a tensor that is given twice: modules may ask `is`
        leaves.setdefault(id(tensor), tensor.detach().clone().requires_grad_())
    outputs = module(*(leaves[id(tensor)] for tensor in inputs), **options)
    outputs = [t for t in (outputs if isinstance(outputs, tuple) else (outputs,)) if t is not None]
    loss = sum((out * randn(*out.shape, dtype=out.dtype, seed=7 + i)).sum() for i, out in enumerate(outputs))
    loss.backward()
    found = {f"output {i}": out.detach() for i, out in enumerate(outputs)}
    found.update({f"gradient of input {i}": leaf.grad for i, leaf in enumerate(leaves.values())})
    found.update({f"gradient of {name}": parameter.grad for name, parameter in module.named_parameters()})
    return found


def assert_same(theirs, ours, inputs, **options):
    """Equal outputs and gradients: to rounding in float64; in float32 no further from float64 than torch is, times 2.

    ``inputs`` and floating options are float64 here, ``theirs`` and ``ours`` may be of either dtype.
    """
    dtype = next(theirs.parameters()).dtype
    given = recast(inputs, dtype)
    same = {name: to(value, dtype) for name, value in options.items()}
    found = results(ours, given, **same)
    peer = results(theirs, given, **same)
    assert set(found) == set(peer)
    if dtype != torch.float64:
        truth = results(copy.deepcopy(theirs).double(), inputs, **options)
    for name, tensor in found.items():
        assert (tensor is None) == (peer[name] is None), name
        if tensor is None:
            continue
        assert tensor.shape == peer[name].shape and tensor.dtype == peer[name].dtype, name
        if dtype == torch.float64:
            torch.testing.assert_close(tensor, peer[name], rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
            continue
        exact = truth[name]
        error, budget = (tensor - exact).norm(), 2 * (peer[name] - exact).norm() + 2**-21 * exact.norm() + 1e-7
        assert error <= budget, f"{name}: error {error:.2e}, budget {budget:.2e}"


def recast(inputs, dtype):
    changed = {id(tensor): to(tensor, dtype) for tensor in inputs}
    return [changed[id(tensor)] for tensor in inputs]


def to(value, dtype):
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
