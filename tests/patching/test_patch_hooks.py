"""What watches a patched model, or wraps its modules, sees what it saw: hooks, wrappers in the place of a forward."""

import copy
import functools
import types

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from tests.patching.models import albert, batch, bert, compare, decoder, distilbert, encoder, results

MODELS = {
    "llama": lambda: decoder("llama"),
    "gemma2": lambda: decoder("gemma2"),
    "phi3": lambda: decoder("phi3"),
    "gpt_neox": lambda: decoder("gpt_neox", use_parallel_residual=False),
    "falcon": lambda: decoder("falcon", new_decoder_architecture=True),
    "persimmon": lambda: decoder("persimmon", qk_layernorm=True),
    "xglm": lambda: decoder("xglm"),
    "opt": lambda: decoder("opt"),
    "bloom": lambda: decoder("bloom"),
    "gpt2": lambda: decoder("gpt2"),
    "bert": bert,
    "distilbert": distilbert,
    "albert": albert,
}


def run_of(kind):
    ids, mask = batch(length=9, lengths=(9, 9, 9) if kind == "gemma2" else (5, 9, 3))
    more = {} if "bert" in kind else {"use_cache": False}
    take = lambda out: out.last_hidden_state if "bert" in kind else out.logits
    return lambda m: take(m(input_ids=ids, attention_mask=mask, **more))[mask.bool()]


def inner_names(model):
    return [name for name, _ in model.named_modules() if ".1." in name or name.endswith(".1")]


def told(args, kwargs):
    """What a hook is told of the tensors of a call, by place and by name."""
    shapes = lambda t: tuple(t.shape) if isinstance(t, torch.Tensor) else None
    tensors = {k: shapes(v) for k, v in kwargs.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    return [shapes(a) for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()], tensors


def watched(kind, name, when, run):
    """The results and what the hooks on one module saw; ``when`` says whether it was patched before or after them."""
    model, seen = MODELS[kind](), []
    if when == "patched before":
        tfk.patch(model, backend="reference")
    module = model.get_submodule(name)
    module.register_forward_pre_hook(lambda m, a, k: seen.append(("pre", *told(a, k))), with_kwargs=True)
    module.register_forward_hook(lambda m, a, k, y: seen.append(("after", *told(a, k))), with_kwargs=True)
    if kind != "falcon":  # whose own code adds in place to what such a hook hands on, and is refused by PyTorch
        module.register_full_backward_hook(lambda m, before, after: seen.append(("back", len(before), len(after))))
    if when == "patched after":
        tfk.patch(model, backend="reference")
    return results(model, run), seen


@pytest.mark.parametrize("kind", MODELS)
def test_hooks_see_the_calls_that_they_saw(kind):
    """On each module of a layer in turn; the attention mask, which may be data of ours, is no matter of theirs."""
    run, names = run_of(kind), inner_names(MODELS[kind]())
    for name in names:
        (wanted, expected), *others = (watched(kind, name, w, run) for w in ("", "patched before", "patched after"))
        for given, seen in others:
            assert seen == expected, name
            compare(given, wanted, 1e-5)


def wrapped(module, calls):
    """A module with its forward wrapped, as accelerate does it: the instance keeps its own and calls it."""
    module._old_forward = module.forward

    def forward(self, *args, **kwargs):
        calls.append(self)
        return self._old_forward(*args, **kwargs)

    module.forward = functools.partial(forward, module)


def unwrapped(module):
    """As accelerate takes its wrapper off again: what was the class' method is now the instance's."""
    module.forward = module.__dict__.pop("_old_forward")


BLOCKS = {"torch": lambda: encoder(), "sequential": lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16))}


@pytest.mark.parametrize("kind", [*MODELS, *BLOCKS])
def test_the_way_back_below_a_wrapped_forward(kind):
    build = {**MODELS, **BLOCKS}[kind]
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
    run, model, calls = (lambda m: m(x)) if kind in BLOCKS else run_of(kind), build(), []
    model.train(kind in BLOCKS)  # in evaluation PyTorch's own layers ask no forward of their parts; none has dropout
    stock = run(model)
    tfk.patch(model, backend="reference")
    for module in list(model.modules()):
        wrapped(module, calls)
    torch.testing.assert_close(run(model), stock)
    assert calls
    tfk.unpatch(model)
    assert torch.equal(run(model), stock)
    for module in model.modules():
        unwrapped(module)
    calls.clear()
    assert torch.equal(run(model), stock) and not calls


@pytest.mark.parametrize("kind", BLOCKS)
def test_the_way_back_after_a_wrapper_went(kind):
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
    model = BLOCKS[kind]().train()
    stock = model(x)
    tfk.patch(model)
    for module in list(model.modules()):
        wrapped(module, [])
        unwrapped(module)
    torch.testing.assert_close(model(x), stock)
    tfk.unpatch(model)
    assert torch.equal(model(x), stock)


def by_decorator(method):
    @functools.wraps(method)
    def forward(*args, **kwargs):
        return method(*args, **kwargs)

    return forward


class ByObject:
    def __init__(self, method):
        self.method = method
        functools.update_wrapper(self, method)

    def __call__(self, *args, **kwargs):
        return self.method(*args, **kwargs)


def unbound(wrap):
    return lambda module: types.MethodType(by_decorator(wrap(module.forward.__func__)), module)


WRAPPERS = {
    "decorator": lambda module: by_decorator(module.forward),
    "compiled": lambda module: torch.compile(module.forward, backend="eager"),
    "unbound decorator": unbound(by_decorator),
    "unbound object": unbound(ByObject),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_way_back_below_wrappers_that_hold_the_patched_forward(wrapper):
    """As accelerate's prepare wraps it for autocast. A copy shares the wrappers and goes on as it was."""
    x, model = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1)), encoder().train()
    stock, classes = model(x), [type(module) for module in model.modules()]
    tfk.patch(model)
    patched = model(x)
    for module in (model, model.layers[1], model.norm):
        module.forward = WRAPPERS[wrapper](module)
    copied = copy.deepcopy(model)
    torch.testing.assert_close(model(x), patched)
    tfk.unpatch(model)
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(model(x), stock)
    if wrapper.startswith("unbound"):  # of the others each copy calls the first model
        assert torch.equal(copied(x), patched)
        tfk.unpatch(copied)
        assert torch.equal(copied(x), stock)
    torch._dynamo.reset()


def test_shapes_on_the_meta_device():
    """Padding is not looked at where there is none to see."""
    model = encoder()
    tfk.patch(model)
    y = model.to("meta")(torch.empty(2, 7, 16, device="meta"), src_key_padding_mask=torch.ones(2, 7, device="meta") > 0)
    assert y.shape == (2, 7, 16) and y.device.type == "meta"


HOOKS = ("forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook")


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("everywhere", [False, True])
def test_each_kind_of_hook_on_a_child(everywhere, hook):
    """On it alone, or on all modules of the process."""
    model, ids = bert(), batch()[0]
    stock = copy.deepcopy(model)
    tfk.patch(model)

    def calls(model):
        seen, child = [], model.encoder.layer[1].intermediate.dense
        note = lambda module, *given: seen.append(module) if module is child else None
        register = getattr(torch.nn.modules.module, f"register_module_{hook}")
        handle = register(note) if everywhere else getattr(child, f"register_{hook}")(note)
        try:
            model(ids).last_hidden_state.square().sum().backward()
        finally:
            handle.remove()
        return len(seen)

    assert calls(model) == calls(stock) == 1
