"""FeedForward, and the feed-forward sublayer that the Transformer layers share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import _check, ops
from .._autocast import as_autocast
from . import _arguments
from ._bypass import dropout_p, plain, plain_linear
from .int8 import int8_feed_forward

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
_NAMES: tuple[tuple[Any, str], ...] = ((F.relu, "relu"), (F.gelu, "gelu"), (torch.relu, "relu"), (F.silu, "silu"))


class FeedForward(nn.Module):
    """y = linear2(dropout(act(linear1(x)))), with a gate linear2(dropout(act(linear1(x)) * gate(x))).

    torch.nn has no module of this name; the children are called and initialised as in its Transformer layers. With a
    gate and "gelu" it is GEGLU, with "silu" SwiGLU.

    Args:
        d_model: E, width of input and output.
        dim_feedforward: F, width in between.
        dropout: probability to drop an element of the hidden activation in training.
        activation: "relu" | "gelu" | "gelu_tanh" | "silu", or a callable such as F.gelu or nn.GELU("tanh").
        bias: False leaves the biases of both linear layers out.
        gated: adds the third matrix ``gate`` (F, E).
        gate_bias: adds a bias to the gate's product, as DINOv2's SwiGLU has it.
        device: of the parameters.
        dtype: of the parameters.
        backend: "reference" | "aten" | "cpu" | "triton" | "cuda", or None to choose automatically.

    Shape:
        x (..., E) -> (..., E).

    Example:
        >>> FeedForward(8, 32, activation="gelu")(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        d_model: int = 512,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = "relu",
        bias: bool = True,
        *,
        gated: bool = False,
        gate_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str | None = None,
    ) -> None:
        _arguments.size("FeedForward", "d_model", d_model)
        _arguments.size("FeedForward", "dim_feedforward", dim_feedforward)
        _check.probability("FeedForward", "dropout", dropout)
        _arguments.backend("FeedForward", backend)
        if gate_bias and not gated:
            raise ValueError("FeedForward: gate_bias must be False without a gate, got True: gated=True adds one")
        super().__init__()
        self.linear1 = nn.Linear(d_model, dim_feedforward, bias=bias, device=device, dtype=dtype)
        self.gate = None
        if gated:
            self.gate = nn.Linear(d_model, dim_feedforward, bias=gate_bias, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias=bias, device=device, dtype=dtype)
        self.activation = activation_function("FeedForward", activation)
        self.backend = backend

    def forward(self, x: Tensor) -> Tensor:
        """Runs every position of ``x`` through the block."""
        _arguments.features("FeedForward", "x", x, self.linear1.in_features, "d_model")
        return feed_forward(x, self.linear1, self.activation, self.dropout, self.linear2, self.backend, self.gate)


def feed_forward(
    x: Tensor,
    linear1: nn.Module,
    activation: Callable[[Tensor], Tensor],
    dropout: nn.Module,
    linear2: nn.Module,
    backend: str | None,
    gate: nn.Module | None = None,
    **options: Any,
) -> Tensor:
    """The block from its children: by ops.ffn, with its ``options``, where they are what they seem, else by calls."""
    name, p = activation_name(activation), dropout_p(dropout)
    readable = plain_linear(linear1) and plain_linear(linear2) and (gate is None or plain_linear(gate))
    if name is None or p is None or not readable:
        y = int8_feed_forward(x, linear1, name, linear2, gate) if name is not None and p == 0.0 else None
        if y is not None:
            return y
        hidden = activation(linear1(x))
        if gate is not None:
            hidden = hidden * gate(x)
        return linear2(dropout(hidden))
    biases = biases_of(linear1, gate)
    weights: Any = linear1.weight, biases, linear2.weight, linear2.bias, None if gate is None else gate.weight
    x, w1, b1, w2, b2, w_gate = as_autocast(x, *weights)  # torch's autocast does not see inside our operators
    return ops.ffn(x, w1, b1, w2, b2, activation=name, gate=w_gate, dropout_p=p, backend=backend, **options)


def biases_of(linear1: Any, gate: Any) -> Tensor | None:
    """``b1`` of ops.ffn: linear1's bias, and behind it the gate's where that has one."""
    if gate is None or gate.bias is None:
        return linear1.bias
    first = gate.bias.new_zeros(linear1.weight.shape[0]) if linear1.bias is None else linear1.bias
    return torch.cat((first, gate.bias))


def activation_function(op: str, activation: str | Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The callable behind an ``activation`` argument."""
    if isinstance(activation, str):
        _check.choice(op, "activation", activation, tuple(ACTIVATIONS))
        return ACTIVATIONS[activation]
    if not callable(activation):
        raise TypeError(f"{op}: activation must be a name or a callable, got {type(activation).__name__}")
    return activation


def activation_name(activation: Any) -> str | None:
    """What ops.ffn calls this callable, None where it does not know it."""
    if isinstance(activation, nn.Module):
        if plain(activation, nn.ReLU):
            return "relu"
        if plain(activation, nn.SiLU):
            return "silu"
        return _gelu(activation.approximate) if plain(activation, nn.GELU) else None
    if isinstance(activation, functools.partial):
        known = activation.func is F.gelu and not activation.args and set(activation.keywords) == {"approximate"}
        return _gelu(activation.keywords["approximate"]) if known else None
    return next((name for function, name in _NAMES if activation is function), None)


def _gelu(approximate: Any) -> str | None:
    return {"none": "gelu", "tanh": "gelu_tanh"}.get(approximate)
