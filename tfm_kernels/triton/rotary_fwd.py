"""rotary_fwd, Triton. Implements ROTARY.1 of tfm_kernels/ops/rotary.py, by the kernel of _rotary.py."""

from __future__ import annotations

from torch import Tensor

from ._rotary import turned


def rotary_fwd(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The operator rotary_fwd_triton; its contract is tfm_kernels/ops/rotary.py's."""
    return turned("rotary_fwd_triton", "x", x, cos, sin, interleaved, back=False)
