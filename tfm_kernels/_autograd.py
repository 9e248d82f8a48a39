"""How gradients come out of the registered operators: one rule for every compiled backend of an op, and three doors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from ._library import NAMESPACE, cpu_extension, exporting, library, plain_calls

_ARGUMENT, _OUTPUT, _GRADIENT, _NEED = range(4)  # csrc/apply.cpp has the same


class Rule:
    """How the gradients of a forward operator come out of its backward operator: a plan read off both schemas' names.

    An argument of the backward is, by its name, one of: the gradient of an output ("dy" of "y"; where only others are
    asked for, the first one becomes zeros), an output of the forward ("rstd"), an argument of the forward ("x"), or
    whether an argument needs its gradient ("need_x"). A result of the backward is the gradient of an argument ("dx" of
    "x"). Outputs whose gradient the backward does not take are not differentiable.

    Two places carry the plan out: csrc/apply.cpp for plain calls, without Python, and ``save`` and ``gradients`` here
    for compiled code, exported programs and whatever is not plain.

    Args:
        forward: a forward operator.
        backward: its backward operator.
        like: the argument of the backward that has the first output's shape and dtype; None where that output is the
            only differentiable one.
        absent: output -> (argument, stand-in): without that argument the output is empty, and the stand-in, another
            argument, is what the backward gets in its place.
        shared: result -> the result that serves for both where this one is left empty.
    """

    def __init__(
        self,
        forward: torch._ops.OpOverload,
        backward: torch._ops.OpOverload,
        like: str | None,
        absent: Mapping[str, tuple[str, str]],
        shared: Mapping[str, str],
    ) -> None:
        arguments = [a.name for a in forward._schema.arguments]
        outputs = [r.name for r in forward._schema.returns]
        given = [a.name for a in backward._schema.arguments]
        results = [r.name for r in backward._schema.returns]
        by_name = {
            **{f"need_{name}": (_NEED, i) for i, name in enumerate(arguments)},
            **{f"d{name}": (_GRADIENT, i) for i, name in enumerate(outputs)},
            **{name: (_ARGUMENT, i) for i, name in enumerate(arguments)},
            **{name: (_OUTPUT, i) for i, name in enumerate(outputs)},
        }
        self.sources = [by_name[name] for name in given]
        self.is_tensor = ["Tensor" in str(a.type) for a in backward._schema.arguments]
        self.targets = [
            (arguments.index(name.removeprefix("d")), results.index(shared[name]) if name in shared else -1)
            for name in results
        ]
        self.absent = [
            (outputs.index(output), *(arguments.index(name) for name in names)) for output, names in absent.items()
        ]
        self.differentiable = [i for i in range(len(outputs)) if (_GRADIENT, i) in self.sources]
        self.like = -1 if like is None else given.index(like)
        self.count = len(arguments)

    def save(self, ctx: Any, arguments: tuple, outputs: Any) -> None:
        """Keeps on ``ctx`` what the backward operator is going to be given."""
        outputs = _several(outputs)
        stand_ins = {o: arguments[stand_in] for o, argument, stand_in in self.absent if arguments[argument] is None}
        tensors: list[Any] = []
        others: list[Any] = []
        for (kind, i), is_tensor in zip(self.sources, self.is_tensor, strict=True):
            if kind in (_ARGUMENT, _OUTPUT):
                value = arguments[i] if kind == _ARGUMENT else stand_ins.get(i, outputs[i])
                (tensors if is_tensor else others).append(value)
        ctx.save_for_backward(*tensors)
        ctx.others, ctx.absent = others, list(stand_ins)
        if len(self.differentiable) < len(outputs):  # torch.compile takes it of several outputs alone
            ctx.mark_non_differentiable(*(t for i, t in enumerate(outputs) if i not in self.differentiable))
        ctx.set_materialize_grads(False)

    def gradients(self, ctx: Any, backward: Callable[..., Any], needs: Sequence[bool], *douts: Any) -> list:
        """One gradient or None per argument; ``needs`` holds a bool per argument."""
        if all(dout is None for dout in douts):
            return [None] * self.count
        tensors, others = iter(ctx.saved_tensors), iter(ctx.others)
        given: list[Any] = []
        for (kind, i), is_tensor in zip(self.sources, self.is_tensor, strict=True):
            if kind == _NEED:
                given.append(needs[i])
            elif kind == _GRADIENT:
                given.append(None if i in ctx.absent else douts[i])
            else:
                given.append(next(tensors if is_tensor else others))
        if given[0] is None:
            given[0] = torch.zeros_like(given[self.like])
        results = _several(backward(*given))
        found: list[Any] = [None] * self.count
        for result, (argument, shared) in zip(results, self.targets, strict=True):
            if needs[argument]:
                found[argument] = results[shared] if shared >= 0 and not result.numel() else result
        return found

    def register_plan(self, forward: str, backward: str) -> int:
        """Tells the C++ extension this plan for these two operators; the number by which it knows it."""
        return cpu_extension.plan(  # type: ignore[union-attr]
            forward, backward,
            sources=self.sources, targets=self.targets, absent=self.absent,
            differentiable=self.differentiable, like=self.like,
        )  # fmt: skip


def differentiate(
    forward: Mapping[str, Any],
    backward: Mapping[str, Any],
    *,
    like: str | None = None,
    absent: Mapping[str, tuple[str, str]] | None = None,
    shared: Mapping[str, str] | None = None,
) -> Callable[..., Any]:
    """Joins the forward and backward operators of an op into its one differentiable function.

    The rule serves three doors: the C++ extension, which is the fast one; an autograd.Function outside the operators,
    which is the one that compiled code sees; and register_autograd on the forward operator, so that exported programs
    can be trained. The backward operators raise when they are differentiated again: a double backward must not be
    silently wrong.

    Args:
        forward: backend -> forward operator, as declare() returned it.
        backward: backend -> backward operator.
        like: see Rule, as for the next two.
        absent: none by default.
        shared: none by default.

    Returns:
        apply(backend, *arguments) -> the forward operator's outputs (one alone by itself), recording a graph where a
        gradient is needed.
    """
    first = next(iter(forward))  # all backends have one schema
    rule = Rule(forward[first], backward[first], like, absent or {}, shared or {})

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, backend: str, *arguments: Any) -> Any:
            outputs = below_autograd(forward[backend], *arguments)
            ctx.backend = backend
            rule.save(ctx, arguments, outputs)
            return outputs

        @staticmethod
        def backward(ctx: Any, *output_gradients: Any) -> Any:
            bwd = backward[ctx.backend]
            if not torch.is_grad_enabled():  # else a double backward is being recorded, which the operator refuses
                bwd = functools.partial(below_autograd, bwd)
            return None, *rule.gradients(ctx, bwd, ctx.needs_input_grad[1:], *output_gradients)

    plans = {}
    for backend, operator in forward.items():
        bwd = backward[backend]
        torch.library.register_autograd(
            operator._schema.name,
            lambda ctx, *grads, _bwd=bwd: tuple(rule.gradients(ctx, _bwd, ctx.needs_input_grad, *grads)),
            setup_context=lambda ctx, inputs, output: rule.save(ctx, inputs, output),
            lib=library,
        )
        _refuse_double_backward(bwd)
        if operator in plain_calls:
            plans[backend] = rule.register_plan(operator._schema.name, bwd._schema.name)

    def apply(backend: str, *arguments: Any) -> Any:
        compiling = torch.compiler.is_compiling()
        if backend in plans and not compiling:
            outputs = cpu_extension.apply(plans[backend], *arguments)  # type: ignore[union-attr]
            if outputs is not NotImplemented:
                return outputs
        if exporting():  # a strict export keeps of the Function what it does without gradients
            return forward[backend](*arguments)
        if torch.is_grad_enabled():
            for argument in arguments:
                if isinstance(argument, torch.Tensor) and argument.requires_grad:
                    return Fused.apply(backend, *(_distinct(arguments) if compiling else arguments))
        return below_autograd(forward[backend], *arguments)

    return apply


def _several(results: Any) -> tuple:
    """The results of an operator, of which one alone comes by itself."""
    return (results,) if isinstance(results, torch.Tensor) else results


def _distinct(arguments: Sequence[Any]) -> list:
    """The arguments, a tensor that comes again as a view of itself: compiled code takes none twice."""
    found: list[Any] = []
    for argument in arguments:
        again = isinstance(argument, torch.Tensor) and any(argument is other for other in found)
        found.append(argument.view_as(argument) if again else argument)
    return found


def below_autograd(operator: Any, *arguments: Any) -> Any:
    """Calls the operator past its Python autograd registration, which costs as much as a small kernel.

    Only for callers that record no graph.
    """
    if torch.compiler.is_compiling():
        return operator(*arguments)
    if operator in plain_calls:
        outputs = cpu_extension.apply(plain_calls[operator], *arguments)  # type: ignore[union-attr]
        if outputs is not NotImplemented:
            return outputs
    if forward_ad._current_level >= 0 and any(_has_tangent(argument) for argument in arguments):
        raise NotImplementedError(
            f"{operator._schema.name} knows no forward-mode differentiation; PyTorch's own operators do"
        )
    with torch._C._AutoDispatchBelowADInplaceOrView():  # as csrc/apply.cpp
        return operator(*arguments)


def _has_tangent(argument: Any) -> bool:
    return isinstance(argument, torch.Tensor) and forward_ad.unpack_dual(argument).tangent is not None


def shaped_like(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``y`` (M, N), which a kernel made of the rows of ``x`` (..., K), as (..., N).

    Where no graph is recorded, autograd does not take it for a view, so that it may be written into as what PyTorch's
    own operators return.
    """
    if x.dim() == 2:
        return y
    if cpu_extension is not None and not torch.compiler.is_compiling():
        shaped = cpu_extension.shaped_like(y, x)
        if shaped is not NotImplemented:
            return shaped
    return y.view(*x.shape[:-1], y.shape[-1])


def _refuse_double_backward(operator: Any) -> None:
    name = operator._schema.name.removeprefix(f"{NAMESPACE}::")
    op, backend = name.split("_bwd_")

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"{op}: the {backend} backend is differentiable once; use backend='reference' for a double backward"
        )

    torch.library.register_autograd(operator._schema.name, refuse, lib=library)
