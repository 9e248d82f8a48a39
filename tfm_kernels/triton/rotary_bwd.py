"""rotary_bwd, Triton. Implements ROTARY.2 of tfm_kernels/ops/rotary.py: the turn back, by the kernel of _rotary.py."""

from __future__ import annotations

from torch import Tensor

from ._rotary import turned


def rotary_bwd(dy: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The operator rotary_bwd_triton; its contract is tfm_kernels/ops/rotary.py's."""
    return turned("rotary_bwd_triton", "dy", dy, cos, sin, interleaved, back=True)
