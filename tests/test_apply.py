"""The C++ way of a call, csrc/apply.cpp, against the way through torch.library and autograd.Function: the same plan."""

import functools
import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import tfm_kernels as tfk
from tfm_kernels import _autograd, ops
from tfm_kernels.ops.layer_norm import FWD


class Watched(TorchFunctionMode):
    """A mode that changes nothing; calls under it are not plain."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def made_in_cpp(output):
    """Whether the op's node is C++'s; a loss is a view or a sum of what it gives."""
    node = output.grad_fn
    while node.name().startswith(("View", "UnsafeView", "Div", "Sum")):
        node = node.next_functions[0][0]
    return "tfm_kernels" in node.name()


def gradients(call, inputs, seeds):
    """(made in C++, outputs, gradients of what wants one) of one call; ``seeds``: which outputs get a gradient."""
    leaves = [None if t is None else t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    outputs = call(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(3)
    chosen = [t for t, seeded in zip(outputs, seeds, strict=False) if seeded]
    douts = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in chosen]
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    found = torch.autograd.grad(chosen, wanted, douts)
    return made_in_cpp(outputs[0]), [*outputs, *found]


def draw(*shape, dtype=torch.float32, grad=True):
    return torch.randn(shape).to(dtype).requires_grad_(grad)


def cases():
    seed = torch.tensor(5)
    options = {"backend": "cpu"}
    half, single = torch.bfloat16, torch.float32
    yield "layer_norm", lambda x, w, b: ops.layer_norm(x, w, b, **options), (draw(3, 8), draw(8), draw(8)), (True,)
    yield (
        "mixed dtypes", lambda x, r, w: ops.add_layer_norm(x, r, w, **options),
        (draw(3, 8, dtype=half), draw(3, 8, dtype=single), draw(8)), (True, True),
    )  # fmt: skip
    for seeds in ((True, True), (True, False), (False, True)):
        yield (
            f"add_rms_norm {seeds}",
            lambda x, r, w: ops.add_rms_norm(x, r, w, dropout_p=0.3, seed=seed, **options),
            (draw(3, 8), draw(3, 8), draw(8)), seeds,
        )  # fmt: skip
        yield (
            f"attention {seeds}",
            lambda q, k, v, b: ops.attention(
                q, k, v, tfk.Mask.causal(), bias=b, dropout_p=0.2, seed=seed, return_lse=True, **options
            ),
            (draw(2, 3, 5, 8), draw(2, 3, 5, 8), draw(2, 3, 5, 6), draw(1, 3, 5, 5)), seeds,
        )  # fmt: skip
    for wanted in itertools.product((False, True), repeat=3):
        if any(wanted):
            grad_x, grad_w, grad_gate = wanted
            yield (
                f"ffn {wanted}", lambda x, w1, w2, gate: ops.ffn(x, w1, None, w2, None, gate=gate, **options),
                (draw(4, 8, grad=grad_x), draw(9, 8, grad=grad_w), draw(7, 9, grad=False), draw(9, 8, grad=grad_gate)),
                (True,),
            )  # fmt: skip
            grad_x, grad_w, grad_bias = wanted
            for reduction in ("mean", "sum", "none"):
                yield (
                    f"linear_cross_entropy {reduction} {wanted}",
                    lambda x, w, b, reduction=reduction: ops.linear_cross_entropy(
                        x, w, TARGET, b, ignore_index=3, label_smoothing=0.1, reduction=reduction, **options
                    ),
                    (draw(2, 4, 8, grad=grad_x), draw(9, 8, grad=grad_w), draw(9, grad=grad_bias)), (True,),
                )  # fmt: skip


TARGET = torch.tensor([[0, 3, 8, 1], [2, 2, 3, 0]])
CASES = {name: case for name, *case in cases()}


@pytest.mark.parametrize("name", CASES)
def test_both_ways_give_the_same_bits(name):
    plain, direct = gradients(*CASES[name])
    with Watched():
        watched, through_python = gradients(*CASES[name])
    assert plain and not watched
    for ours, theirs in zip(direct, through_python, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def norm(x, weight=None):
    return ops.layer_norm(x, weight, backend="cpu")


def test_no_graph_without_a_gradient():
    x = draw(3, 8)
    with torch.no_grad():
        assert norm(x).grad_fn is None
    assert norm(x.detach()).grad_fn is None
    with torch.inference_mode():
        assert norm(x).is_inference()


def test_what_the_backward_needs_must_not_have_changed():
    x = draw(3, 8, grad=False)
    weight = draw(8)
    y = norm(x, weight)
    x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_graph_is_used_once_unless_kept():
    x = draw(3, 8)
    y = norm(x)
    (first,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(y.square().sum(), x)
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(y.square().sum(), x)


@pytest.mark.parametrize("way", [nullcontext, functools.partial(FlopCounterMode, display=False)])
def test_a_double_backward_is_refused(way):
    """In C++, and in Python, where a mode is on."""
    x = draw(3, 8)
    with way():
        y = norm(x)
    assert made_in_cpp(y) is (way is nullcontext)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        dx.sum().backward()


def test_hooks_of_saved_tensors_are_called():
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t):
        x = draw(3, 8)
        y = norm(x)
    assert (3, 8) in seen and made_in_cpp(y)


def test_a_subclass_and_a_mode_take_the_other_way():
    tagged = draw(3, 8).detach().as_subclass(type("Tagged", (torch.Tensor,), {})).requires_grad_()
    assert not made_in_cpp(norm(tagged))
    assert made_in_cpp(norm(draw(3, 8)))
    with FlopCounterMode(display=False):
        assert not made_in_cpp(norm(draw(3, 8)))


def test_forward_mode_and_functorch_are_refused():
    x = draw(3, 8)
    with forward_ad.dual_level(), pytest.raises((RuntimeError, NotImplementedError), match="forward|jvp"):
        norm(forward_ad.make_dual(x, torch.ones_like(x)))
    with pytest.raises(tfk.BackendError, match="a transform of torch.func .* is under way"):
        torch.func.grad(lambda t: norm(t).sum())(x)


BYTES = torch.arange(-32, 32).to(torch.int8).view(8, 8)


def plain_inputs():
    """op -> (call(backend, x), x) of ops of one tensor that needs no gradient; the others are fixed."""
    weight, rows = draw(8, 8, grad=False), draw(3, 8, grad=False)
    return {
        "layer_norm": (lambda backend, x: ops.layer_norm(x, backend=backend), rows),
        "add_rms_norm": (lambda backend, x: ops.add_rms_norm(x, rows, backend=backend)[0], rows),
        "attention": (lambda backend, x: ops.attention(x, x, x, backend=backend), draw(1, 2, 5, 8, grad=False)),
        "ffn": (lambda backend, x: ops.ffn(x, weight, None, weight, None, backend=backend), rows),
        "linear": (lambda backend, x: ops.linear(x, weight, backend=backend), rows),
        "int8_ffn": (
            lambda backend, x: ops.int8_ffn(
                x, BYTES, torch.ones(8), None, BYTES, torch.ones(8), None, dynamic=True, backend=backend
            ),
            rows,
        ),
        "int8_linear": (lambda backend, x: ops.int8_linear(x, BYTES, torch.ones(8), backend=backend), rows),
        "linear_cross_entropy": (
            lambda backend, x: ops.linear_cross_entropy(x, weight, torch.tensor([7, 0, 3]), backend=backend),
            rows,
        ),
        "rotary": (lambda backend, x: ops.rotary(x, rows, rows, backend=backend), draw(1, 2, 3, 8, grad=False)),
    }


@pytest.mark.parametrize("grad_mode", [True, False])
@pytest.mark.parametrize("name", plain_inputs())
def test_forward_mode_is_refused_where_no_gradient_is_needed(name, grad_mode):
    """Also after plain calls of the same shape, whose choice is known; and plain calls go on as before."""
    call, x = plain_inputs()[name]
    with torch.set_grad_enabled(grad_mode):
        before = call("cpu", x)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            with pytest.raises(tfk.BackendError, match="forward-mode differentiation is under way"):
                call("cpu", dual)
        assert torch.equal(call("cpu", x), before)


def test_a_tangent_is_never_dropped():
    """Whatever the choice of a backend has overlooked."""
    x = draw(3, 8, grad=False)
    arguments = None, None, None, 1e-5, 0.0, False, False, 0.0, None, None, True
    for mode in (nullcontext, Watched):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            with mode(), pytest.raises(NotImplementedError, match="layer_norm_fwd_cpu knows no forward-mode"):
                _autograd.below_autograd(FWD["cpu"], dual, *arguments)
    assert _autograd.below_autograd(FWD["cpu"], x, *arguments)[0].shape == x.shape


def test_outputs_may_be_written_into():
    """As those of PyTorch's own operators: they are no views that autograd keeps track of."""
    other = draw(8)
    x, weight = draw(2, 3, 8, grad=False), draw(8, 8, grad=False)
    calls = {
        "layer_norm": lambda x: ops.layer_norm(x, backend="cpu"),
        "attention": lambda x: ops.attention(x[None], x[None], x[None], backend="cpu"),
        "ffn": lambda x: ops.ffn(x, weight, None, weight, None, backend="cpu"),
        "linear": lambda x: ops.linear(x, weight, backend="cpu"),
        "int8_linear": lambda x: ops.int8_linear(x, BYTES, torch.ones(8), dynamic=True, backend="cpu"),
        "rotary": lambda x: ops.rotary(x[None], weight[:3], weight[3:6], backend="cpu"),
        "nn.LayerNorm": tfk.nn.LayerNorm(8, elementwise_affine=False, backend="cpu"),
        "nn.RMSNorm": tfk.nn.RMSNorm(8, elementwise_affine=False, backend="cpu"),
    }
    for name, call in calls.items():
        for mode in (nullcontext, Watched):
            with torch.no_grad(), mode():
                y = call(x)
            expected = y + other
            if mode is nullcontext or name in ("layer_norm", "attention"):
                assert not y._is_view(), name
                assert torch.equal(y.add_(other), expected), name
        if name in ("linear", "int8_linear"):
            continue
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        version = y._version
        y.add_(1)
        assert y._version == version + 1 and torch.equal(y, call(leaf) + 1)
        y = call(leaf).mul_(2)
        if name == "attention":  # its backward reads the output
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
        else:
            (dx,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
            (expected,) = torch.autograd.grad(call(leaf), leaf, torch.full_like(y, 2))
            torch.testing.assert_close(dx, expected)


def test_compiled_autograd_reads_the_node():
    from torch._dynamo import compiled_autograd

    inputs = draw(2, 3, 5, 8), draw(2, 3, 5, 8), draw(2, 3, 5, 8)
    call = lambda: ops.attention(*inputs, tfk.Mask.causal(), backend="cpu")
    eager = torch.autograd.grad(call().sum(), inputs)
    out = call().sum()
    with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")):
        out.backward()
    for leaf, gradient in zip(inputs, eager, strict=True):
        assert torch.equal(leaf.grad, gradient)


def test_numbers_of_other_types_are_still_numbers():
    x = draw(3, 8)
    assert torch.equal(ops.layer_norm(x, eps=1, backend="cpu"), ops.layer_norm(x, eps=1.0, backend="cpu"))


def _one_tensor_twice():
    """(call, its tensors): what self-attention, tied weights and residuals of their own norm pass."""
    ends = torch.tensor([0, 5, 20], dtype=torch.int32)
    return {
        "attention": (lambda x: ops.attention(x, x, x, backend="cpu"), [torch.randn(2, 4, 16, 8)]),
        "attention_varlen": (
            lambda x: ops.attention_varlen(x, x, x, ends, ends, 15, 15, backend="cpu"), [torch.randn(20, 4, 8)]
        ),
        "add_layer_norm": (lambda x: ops.add_layer_norm(x, x, backend="cpu")[0], [torch.randn(6, 16)]),
        "ffn": (
            lambda x, w: ops.ffn(x, w, None, w, None, backend="cpu"), [torch.randn(6, 16), torch.randn(16, 16)]
        ),
        "linear_cross_entropy": (
            lambda x: ops.linear_cross_entropy(x, x, torch.arange(6), backend="cpu"), [torch.randn(6, 16)]
        ),
    }  # fmt: skip


@pytest.mark.parametrize("op", _one_tensor_twice())
def test_compiled_calls_take_one_tensor_for_two_arguments(op):
    call, inputs = _one_tensor_twice()[op]
    leaves = [t.requires_grad_() for t in inputs]
    found = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        out = function(*leaves)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    torch.testing.assert_close(*found)  # three gradients of one tensor are summed in another order
