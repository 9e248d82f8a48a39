"""Packed copies of weights, kept from call to call for a model that the user froze: ``patch(model, freeze=True)``.

oneDNN reads a weight in an order of its own and brings it into that order at every call. A frozen module keeps the
result; a 16-bit weight is kept as float32 where 16-bit products are emulated. Processors with AVX2 and no AVX-512 keep
nothing: oneDNN reaches 0.8 to 0.9 of F.linear's rate there, packed or not (16 to 8192 rows, Zen 3). The copies are made
at the first call that pays for them and lie beside the modules, not in them: no state_dict, deepcopy or pickle holds
one, and what they make is frozen again and makes its own. A copy whose weight was changed or replaced is made anew, and
all are after a step of any optimizer. A write past PyTorch's count of them (``_version``), by ``.data`` or from NumPy,
is noticed where it changes one of 256 elements that each call compares: as merging an adapter does (peft writes
``weight.data += ...``), and writing to a few elements by hand need not.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .. import _check
from . import guard, onednn

FROZEN = "_tfm_kernels_frozen"  # in a module's __dict__, so that copies of a frozen model are frozen
# Where a call of oneDNN by a packed weight gains more over F.linear than it costs (Cascade Lake, one core, weights of
# 384 x 384 to 3072 x 768 in float32 and bfloat16); with fewer rows F.linear is also three times as exact.
_ROWS = 16
_PRODUCTS = 2**23  # rows times elements of the weight
_SAMPLED = 16  # rows and columns of a weight that each call compares with what they were
_REFUSAL = (
    "patch: a model patched with freeze=True is for inference alone, so call model.eval() and run it under "
    "torch.no_grad() or torch.inference_mode(), or give its weights free by patch(model) or unpatch(model)"
)


@dataclass(frozen=True, eq=False)
class _Copy:
    """A packed weight, and what its weight was then.

    Attributes:
        source: an alias of the weight; while it lives, no other tensor can get the same memory.
        version: how often the weight had been written to.
        sample: (<= 16, <= 16) of its elements, from all over it.
        packed: the copy.
    """

    source: Tensor
    version: int
    sample: Tensor
    packed: Tensor

    def is_of(self, weight: Tensor) -> bool:
        """Whether the weight is what it was."""
        source = self.source
        return (
            source.data_ptr() == weight.data_ptr()
            and self.version == weight._version
            and source.dtype == weight.dtype
            and source.shape == weight.shape
            and source.stride() == weight.stride()
            and torch.equal(self.sample, _sample(weight))
        )


def _sample(weight: Tensor) -> Tensor:
    """At most 16 x 16 elements of a weight (out, in), a view."""
    step = [-(-size // _SAMPLED) for size in weight.shape]
    return weight.detach()[:: step[0], :: step[1]]


_copies: weakref.WeakKeyDictionary[nn.Module, _Copy] = weakref.WeakKeyDictionary()


@functools.cache
def _notice_optimizers() -> None:
    """Drops all copies after an optimizer's step: fused ones write to weights without counting (_version)."""
    register_optimizer_step_post_hook(lambda *_: _copies.clear())


def freeze(module: nn.Module) -> None:
    """Lets a module keep a packed copy of its weight from its next call on."""
    _notice_optimizers()
    module.__dict__[FROZEN] = True


def thaw(module: nn.Module) -> bool:
    """Drops what a module keeps; True where it was frozen."""
    _copies.pop(module, None)
    return module.__dict__.pop(FROZEN, False)


def is_frozen(module: nn.Module) -> bool:
    """Whether a module may keep a packed copy of its weight."""
    return FROZEN in module.__dict__


def nbytes(module: nn.Module) -> int:
    """How much memory the copy of a module takes now."""
    return onednn.nbytes(_copies[module].packed) if module in _copies else 0


def product(x: Tensor, module: nn.Module, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """x weight^T + bias by the copy that a frozen module keeps of ``weight``; None where that does not serve the call.

    Raises:
        RuntimeError: the module is frozen, and in training mode or asked for a gradient.
    """
    if torch.compiler.is_compiling() or FROZEN not in module.__dict__:
        return None
    if module.training or _check.records_graph(x, weight, bias):
        raise RuntimeError(_REFUSAL)
    if x.shape[-1] != weight.shape[-1] or not _pays(x, weight) or not _can_keep(x, weight):
        return None
    copy = _copies.get(module)
    if copy is None or not copy.is_of(weight):
        source = weight.detach()
        copy = _copies[module] = _Copy(source, weight._version, _sample(source).clone(), onednn.pack(source.float()))
    return onednn.product(x.float(), copy.packed, None if bias is None else bias.float()).to(x.dtype)


def _pays(x: Tensor, weight: Tensor) -> bool:
    rows = x.numel() // max(weight.shape[-1], 1)
    return rows >= _ROWS and rows * weight.numel() >= _PRODUCTS


def _can_keep(x: Tensor, weight: Tensor) -> bool:
    if not onednn.gains() or guard.tracing(x, weight):
        return False
    if not (x.dtype == weight.dtype and x.device.type == weight.device.type == "cpu"):
        return False
    if torch.is_autocast_enabled("cpu") or weight.numel() == 0 or weight.is_inference():  # inference: not counted
        return False
    return weight.dtype == torch.float32 or weight.dtype in onednn.EMULATED
