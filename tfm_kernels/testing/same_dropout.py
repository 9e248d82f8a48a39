"""same_dropout(): PyTorch's own dropout by the project's random rule, so that any two programs drop the same elements.

PyTorch's dropout draws the mask element by element from its generator, in an order no fused kernel can follow. Inside
``same_dropout`` each dropout draws one seed instead, by ``dropout.draw_seed`` as the fused operations do, and takes the
mask that ``dropout.keep_mask`` gives to row = flattened leading axes, column = last axis. Attention weights of shape
(B, H, Tq, Tk) so get row (b * H + h) * Tq + i, column j: the fused attention's own. The arithmetic stays PyTorch's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from .. import dropout

_aten = torch.ops.aten
_SEED: tuple = (0, dropout.SEEDS, [])  # what ``dropout.draw_seed`` calls randint with
_DROPOUTS = {_aten.bernoulli_.float, _aten.native_dropout.default}
_AT_ONCE = 1 << 15  # elements, whose draws stay in a CPU's caches: all at once take up to four times as long


class _SameDropout(TorchDispatchMode):
    """Works below autograd, where all of PyTorch's dropouts have become one of two operators."""

    supports_higher_order_operators = True  # by one of which compiled code draws again what a checkpoint forgot

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):
            return func(*args, **kwargs)
        if func is _aten.bernoulli_.float:  # the mask of a dropout on the CPU, kept with probability 1 - p
            p = 1.0 - (args[1] if len(args) > 1 else 0.5)  # the default is left out
            return args[0].copy_(self._keep(args[0], p))
        if func is _aten.native_dropout.default and args[2] is not False:  # on a GPU, or in a graph
            if not 0.0 < args[1] < 1.0:  # some of its kernels draw even so
                keep = torch.full_like(args[0], args[1] < 1.0, dtype=torch.bool)
                return args[0] * keep, keep
            keep = self._keep(args[0], args[1])
            return args[0] * keep * dropout.keep_scale(args[1]), keep
        if torch.is_inference_mode_enabled():  # composed operators come here whole
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)

    def _keep(self, like: Tensor, p: float) -> Tensor:
        columns = like.shape[-1] if like.dim() else 1
        return self._mask(like.device, p, like.numel() // columns if columns else 0, columns).view(like.shape)

    def _mask(self, device: torch.device, p: float, rows: int, columns: int) -> Tensor:
        return _mask(dropout.draw_seed(device), p, rows, columns)


class _AroundGraphs(_SameDropout):
    """For what runs between compiled graphs: the compiler takes no notice of it."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class _InGraph(_SameDropout):
    """For what a compiler traces. Each seed is drawn over the one before: compiled code keeps no order but of data."""

    def __init__(self, others: set[str]) -> None:
        super().__init__()
        self._others = others
        self._last: dict[str, Tensor] = {}  # by the type of device, each with a generator of its own

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten.randint.low and args == _SEED:
            return self._seed(torch.device(kwargs["device"]))
        if (
            isinstance(func, torch._ops.OpOverload)
            and torch.Tag.nondeterministic_seeded in func.tags
            and func not in _DROPOUTS
        ):
            self._others.add(str(func))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _seed(self, device: torch.device) -> Tensor:
        last = self._last.get(device.type)
        self._last[device.type] = dropout.draw_seed(device) if last is None else _aten.random.to(last, dropout.SEEDS)
        return self._last[device.type]

    def _mask(self, device: torch.device, p: float, rows: int, columns: int) -> Tensor:
        return torch.ops.tfm_kernels_testing.mask(self._seed(device), p, rows, columns)


def _mask(seed: Tensor, p: float, rows: int, columns: int) -> Tensor:
    at_once = _AT_ONCE if seed.device.type == "cpu" else rows * columns
    few = torch.arange(rows, device=seed.device).split(max(1, at_once // max(1, columns)))
    return torch.cat([dropout.keep_mask(seed, p, part, columns) for part in few])


_library = torch.library.Library("tfm_kernels_testing", "FRAGMENT")  # an operator, as compiling the rule takes seconds
_library.define(
    "mask(Tensor seed, float p, SymInt rows, SymInt columns) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
_library.impl("mask", _mask, "CompositeExplicitAutograd")


@torch.library.register_fake("tfm_kernels_testing::mask", lib=_library)
def _fake(seed: Tensor, p: float, rows: int, columns: int) -> Tensor:
    return seed.new_empty((rows, columns), dtype=torch.bool)


@contextmanager
def same_dropout(device: torch.device | str = "cpu") -> Iterator[None]:
    """Inside the ``with`` block every dropout of PyTorch keeps the elements that a fused operation would keep.

    Two programs that draw in the same order, say a model and its fused version, then drop the same elements after the
    same ``torch.manual_seed``. Dropout with p = 1 draws nothing in PyTorch.

    Args:
        device: where the program runs. On a GPU, attention is held to PyTorch's composed formula, since the seeds of
            its fused kernels cannot be reached.

    Example:
        >>> stock, fused = (layers.TransformerEncoderLayer(8, 2, batch_first=True) for layers in (nn, tfk.nn))
        >>> fused.load_state_dict(stock.state_dict())
        <All keys matched successfully>
        >>> x, found = torch.randn(2, 5, 8), []
        >>> with same_dropout():
        ...     for layer in (stock, fused):
        ...         _ = torch.manual_seed(0)
        ...         found.append(layer(x))
        >>> (found[0] - found[1]).abs().max() < 1e-5
        tensor(True)
    """
    with _uncompiled(), _SameDropout(), _composed_attention(device):
        yield


@contextmanager
def around_graphs(device: torch.device | str) -> Iterator[None]:
    """As ``same_dropout``, for calls of compiled code, whose graphs were traced within ``in_graph``."""
    with _AroundGraphs(), _composed_attention(device):
        yield


@contextmanager
def in_graph(device: torch.device | str, others: set[str]) -> Iterator[None]:
    """As ``same_dropout``, around what is traced for a compiler, which is to leave drawing to PyTorch.

    Args:
        device: where it will run.
        others: gets the names of operators that draw and are no dropout.
    """
    with _InGraph(others), _composed_attention(device):
        yield


def _uncompiled() -> AbstractContextManager[Any]:
    """In a mode nothing is compiled, and code that is met first there never would be, were it not told to run eager."""
    imported = "torch._dynamo" in sys.modules  # which takes seconds; without it nothing is compiled
    return torch.compiler.set_stance("force_eager") if imported else nullcontext()


def _composed_attention(device: torch.device | str) -> AbstractContextManager[None]:
    return nullcontext() if torch.device(device).type == "cpu" else sdpa_kernel(SDPBackend.MATH)
