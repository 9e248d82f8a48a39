"""same_dropout(): PyTorch's own dropout by the project's random rule, so that any two programs drop the same elements.

PyTorch's dropout draws the mask element by element from its generator, in an order no fused kernel can follow. Inside
``same_dropout`` each dropout draws one seed instead, by ``dropout.draw_seed`` as the fused operations do, and takes the
mask that ``dropout.keep_mask`` gives to row = flattened leading axes, column = last axis. Attention weights of shape
(B, H, Tq, Tk) so get row (b * H + h) * Tq + i, column j: the fused attention's own. The arithmetic stays PyTorch's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from .. import dropout

_aten = torch.ops.aten
_AT_ONCE = 1 << 15  # elements, whose draws stay in a CPU's caches: all at once take up to four times as long


class _SameDropout(TorchDispatchMode):
    """Works below autograd, where all of PyTorch's dropouts have become one of two operators."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten.bernoulli_.float:  # the mask of a dropout on the CPU, kept with probability 1 - p
            p = 1.0 - (args[1] if len(args) > 1 else 0.5)  # the default is left out
            return args[0].copy_(_keep(args[0], p))
        if func is _aten.native_dropout.default and args[2] is not False and 0.0 < args[1] < 1.0:  # on a GPU
            keep = _keep(args[0], args[1])
            return args[0] * keep * dropout.keep_scale(args[1]), keep
        if torch.is_inference_mode_enabled():  # composed operators come here whole
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)


def _keep(like: Tensor, p: float) -> Tensor:
    columns = like.shape[-1] if like.dim() else 1
    rows = torch.arange(like.numel() // columns if columns else 0, device=like.device)
    seed, at_once = dropout.draw_seed(like.device), _AT_ONCE if like.device.type == "cpu" else like.numel()
    few = rows.split(max(1, at_once // max(1, columns)))
    return torch.cat([dropout.keep_mask(seed, p, part, columns) for part in few]).view(like.shape)


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
    with _SameDropout():
        if torch.device(device).type == "cpu":
            yield
        else:
            with sdpa_kernel(SDPBackend.MATH):
                yield
