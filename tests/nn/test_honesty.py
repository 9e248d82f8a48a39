"""A fused layer reads its children's parameters, but where that would be seen it calls them: hooks, other classes."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import tfm_kernels as tfk
from tfm_kernels.testing.float64 import assert_same_in_float64

from .twins import randn

E, H, FF = 12, 4, 20
X = randn(3, 5, E).requires_grad_()
MEMORY = randn(3, 6, E, seed=1)


def layer(kind, **options):
    torch.manual_seed(0)
    options = {"batch_first": True, "dtype": torch.float64, "dropout": 0.0, "backend": "cpu", **options}
    return getattr(tfk.nn, f"Transformer{kind}Layer")(E, H, FF, **options)


def run(module, **options):
    return module(X, **options) if isinstance(module, nn.TransformerEncoderLayer) else module(X, MEMORY, **options)


CHILDREN = {
    "Encoder": ["self_attn", "linear1", "dropout", "linear2", "norm1", "norm2", "dropout1", "dropout2"],
    "Decoder": ["self_attn", "multihead_attn", "linear1", "dropout", "linear2", "norm1", "norm2", "norm3"]
    + ["dropout1", "dropout2", "dropout3"],
}
PLACES = [(kind, child, order) for kind, names in CHILDREN.items() for child in names for order in (False, True)]


@pytest.mark.parametrize(("kind", "child", "norm_first"), PLACES)
@pytest.mark.parametrize("hook", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_of_every_child_run(kind, child, norm_first, hook):
    module = layer(kind, norm_first=norm_first)
    expected = run(module)
    seen = []
    getattr(module.get_submodule(child), f"register_{hook}_hook")(lambda *args: seen.append(child))
    y = run(module)
    y.sum().backward()
    assert seen == [child]
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("kind", "child", "norm_first"), PLACES)
def test_children_of_other_classes_are_called(kind, child, norm_first):
    module = layer(kind, norm_first=norm_first)
    original = module.get_submodule(child)
    calls = []

    class Other(type(original)):
        def forward(self, *args, **kwargs):
            calls.append(child)
            return super().forward(*args, **kwargs)

    expected = run(module)
    original.__class__ = Other
    torch.testing.assert_close(run(module), expected, rtol=1e-11, atol=1e-12)
    assert calls == [child]


@pytest.mark.parametrize("child", ["linear1", "norm2", "dropout", "dropout1"])
def test_a_forward_of_the_instance_is_called(child):
    module = layer("Encoder")
    target, calls = module.get_submodule(child), []
    forward = target.forward
    target.forward = lambda x: (calls.append(child), forward(x))[1]
    run(module)
    assert calls == [child]


def test_global_hooks_see_every_child():
    module, seen = layer("Encoder"), []
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: seen.append(m))
    try:
        run(module)
    finally:
        handle.remove()
    assert set(seen) == set(module.modules())


class LoRA(nn.Module):
    """What adapter libraries put in the place of a Linear."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False, dtype=torch.float64)
        self.up = nn.Linear(2, base.out_features, bias=False, dtype=torch.float64)

    @property
    def weight(self):
        return self.base.weight

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("child", ["linear1", "linear2", "self_attn.out_proj"])
def test_adapters_are_not_bypassed(child):
    module = layer("Encoder")
    plain = run(module)
    adapter = LoRA(module.get_submodule(child))
    module.set_submodule(child, adapter)
    y = run(module)
    assert (y - plain).abs().max() > 1e-3
    y.sum().backward()
    assert adapter.up.weight.grad.any() and adapter.down.weight.grad.any()
    merged = layer("Encoder")
    merged.get_submodule(child).weight.data += adapter.up.weight @ adapter.down.weight
    torch.testing.assert_close(run(merged), y, rtol=1e-10, atol=1e-11)


def test_parametrized_and_pruned_weights():
    module, base = layer("Encoder"), layer("Encoder")
    parametrizations.weight_norm(module.linear1)
    parametrizations.weight_norm(module.self_attn, "in_proj_weight")
    torch.testing.assert_close(run(module), run(base), rtol=1e-11, atol=1e-12)
    run(module).sum().backward()
    assert module.linear1.parametrizations.weight.original0.grad.any()
    parametrize.remove_parametrizations(module.linear1, "weight")
    prune.l1_unstructured(module.linear2, "weight", amount=0.5)  # works by a pre-hook
    module.linear2.weight_mask.zero_()
    y = run(module)
    assert not torch.allclose(y, run(base))


@pytest.mark.parametrize("child", ["linear2", "self_attn.out_proj"])
def test_a_mask_of_pruning_counts_at_each_call(child):
    """PyTorch's own attention reads out_proj's weight past the hook that makes it, and goes on with an older one."""
    module, base = layer("Encoder"), layer("Encoder")
    prune.l1_unstructured(module.get_submodule(child), "weight", amount=0.5)
    module.get_submodule(child).weight_mask.zero_()
    base.get_submodule(child).weight.data.zero_()
    assert_same_in_float64(run(module), run(base))


def test_a_tensor_subclass_as_weight_is_called():
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs)

    seen = []
    module = layer("Encoder")
    module.linear1.weight = nn.Parameter(module.linear1.weight.data.as_subclass(Loud), requires_grad=False)
    run(module)
    assert nn.functional.linear in seen


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(("kind", "name"), [("Encoder", "_sa_block"), ("Encoder", "_ff_block")]
                         + [("Decoder", name) for name in ("_sa_block", "_mha_block", "_ff_block")])  # fmt: skip
@pytest.mark.parametrize("on", ["class", "instance"])
def test_overridden_blocks_are_called(norm_first, kind, name, on):
    """The usual way to get at the attention weights of torch's layers."""
    module = layer(kind, norm_first=norm_first)
    expected, calls = run(module), []
    original = getattr(module, name)

    def block(*args, **kwargs):
        calls.append(name)
        return original(*args, **kwargs)

    if on == "instance":
        setattr(module, name, block)
    else:
        module.__class__ = type("Mine", (type(module),), {name: lambda self, *args, **kwargs: block(*args, **kwargs)})
    torch.testing.assert_close(run(module), expected, rtol=1e-11, atol=1e-12)
    assert calls == [name]


@pytest.mark.parametrize("order", [False, True])
def test_hooks_on_the_layers_of_a_stack_run(order):
    """Also in a norm_first stack, whose layers otherwise hand each other unfinished sums."""
    seen = []
    encoder = tfk.nn.TransformerEncoder(layer("Encoder", norm_first=order), 3)
    decoder = tfk.nn.TransformerDecoder(layer("Decoder", norm_first=order), 3)
    for stack, given in ((encoder, (X,)), (decoder, (X, MEMORY))):
        expected = stack(*given)
        stack.layers[1].register_forward_hook(lambda module, args, out: seen.append(out))
        torch.testing.assert_close(stack(*given), expected, rtol=1e-11, atol=1e-12)
    assert len(seen) == 2 and all(out.shape == X.shape for out in seen)


def test_an_rms_norm_in_the_place_of_a_layer_norm_is_used():
    module = layer("Encoder")
    module.norm1, module.norm2 = (tfk.nn.RMSNorm(E, 1e-5, dtype=torch.float64, backend="cpu") for _ in range(2))
    y = run(module)
    x = module.norm1(X + module.self_attn(X, X, X)[0])
    expected = module.norm2(x + module.linear2(module.linear1(x).relu()))
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)
