"""Linear layers and attention projections with weights of 8 bits, in place of those of torch.nn."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import _backend, _library, ops
from .._autocast import as_autocast
from . import _arguments
from ._bypass import plain
from .attention import MultiheadAttention

_FEW = 32  # rows; with more, 16-bit tiles multiply faster than float32, in which ops.int8_ffn has its hidden activation


def quantized_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight (N, K) as integers (N, K), int8, from -127 to 127, and the step of each row (N,), float32.

    Raises:
        ValueError: the weight holds NaN or an infinity, or no numbers at all.
    """
    if weight.is_meta:
        raise ValueError("quantized_weight: weight must hold numbers, got one on the device meta")
    wide = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    if not bool(wide.isfinite().all()):
        raise ValueError("quantized_weight: weight must be finite, got one with NaN or infinities")
    largest = wide.abs().amax(1) if wide.shape[1] else wide.new_zeros(wide.shape[0])
    scale = (largest / 127).float()
    step = torch.where(scale > 0, scale, 1.0).to(wide.dtype)
    return torch.round(wide / step[:, None]).clamp(-127, 127).to(torch.int8), scale


class Int8Linear(nn.Module):
    """y = (x weight^T) scale + bias with a weight of int8, for inference.

    Holds a quarter of the bytes that nn.Linear does in float32. There is no gradient for the weight; one for ``x``
    and the bias is PyTorch's. A floating weight that is assigned, as by tying it to an embedding, or found in a
    state_dict without ``scale``, becomes the nearest integers.

    Args:
        in_features: K.
        out_features: N.
        bias: False leaves the bias out.
        dynamic: rounds each row of the input to int8 as well, for a product of integers.
        device: of weight, scale and bias.
        dtype: of bias, input and output.
        backend: "reference" | "aten" | "cpu" | "triton", or None to choose automatically.

    Shape:
        x (..., K) -> (..., N).

    Attributes:
        weight: (N, K), int8.
        scale: (N,), float32, whatever the module is cast to.
        bias: (N,) or None.

    Example:
        >>> layer = Int8Linear.from_weight(torch.tensor([[1.0, -0.5]]))
        >>> layer(torch.tensor([[2.0, 2.0]])).round(decimals=1)
        tensor([[1.]])
    """

    scale: Tensor
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        dynamic: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str | None = None,
    ) -> None:
        _arguments.size("Int8Linear", "in_features", in_features, 0)
        _arguments.size("Int8Linear", "out_features", out_features, 0)
        _arguments.backend("Int8Linear", backend)
        super().__init__()
        self.in_features, self.out_features, self.dynamic, self.backend = in_features, out_features, dynamic, backend
        whole = torch.zeros(out_features, in_features, dtype=torch.int8, device=device)
        self.weight = nn.Parameter(whole, requires_grad=False)
        self.register_buffer("scale", torch.ones(out_features, device=device, dtype=torch.float32))
        shift = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype), requires_grad=False)
        self.register_parameter("bias", shift if bias else None)

    @classmethod
    def from_weight(
        cls, weight: Tensor, bias: Tensor | None = None, *, dynamic: bool = False, backend: str | None = None
    ) -> Int8Linear:
        """The layer whose weight is nearest to ``weight`` (N, K), floating: 127 steps up to each row's largest.

        Raises:
            ValueError: ``weight`` holds NaN or an infinity, or is on the device meta.
        """
        out, width = weight.shape
        given: Any = {"dynamic": dynamic, "device": weight.device, "dtype": weight.dtype, "backend": backend}
        layer = cls(width, out, bias is not None, **given)
        layer.weight.data, layer.scale = quantized_weight(weight)
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
        return layer

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and isinstance(value, Tensor) and value.is_floating_point():
            integers, self.scale = quantized_weight(value)
            self.out_features, self.in_features = integers.shape
            value = nn.Parameter(integers, requires_grad=False)
        super().__setattr__(name, value)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if isinstance(weight, Tensor) and weight.is_floating_point() and f"{prefix}scale" not in state_dict:
            state_dict[f"{prefix}weight"], state_dict[f"{prefix}scale"] = quantized_weight(weight)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        """Runs each row of ``x`` through the layer."""
        _arguments.features("Int8Linear", "x", x, self.in_features, "in_features")
        return self.part(x, 0, self.out_features)

    def part(self, x: Tensor, begin: int, end: int) -> Tensor:
        """Features ``begin`` to ``end`` - 1 of what the layer gives."""
        weight: Tensor = self.weight
        scale: Tensor = self.scale
        bias: Tensor | None = self.bias
        if end - begin < self.out_features:
            weight, scale, bias = weight[begin:end], scale[begin:end], None if bias is None else bias[begin:end]
        x, bias = as_autocast(x, bias)
        return ops.int8_linear(
            x, weight, scale, bias, dynamic=self.dynamic, backend=_offered("int8_linear", self.backend)
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Linear:
        scale = self.scale
        super()._apply(fn, recurse)
        if self.scale.dtype != torch.float32:  # half() and the like mean what is computed with, not this
            self.scale = scale.to(self.scale.device)
        return self

    def extra_repr(self) -> str:
        """What repr() shows of the layer."""
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, dynamic={self.dynamic}"


def int8_feed_forward(x: Tensor, first: Any, activation: str, second: Any, gate: Any = None) -> Tensor | None:
    """second(act(first(x)) [* gate(x)]) by ops.int8_ffn; None where these are not plain Int8Linear of one kind.

    ``gate`` may be ``first``, whose second half of rows then is the gate. Layers that are not dynamic gain where rows
    are few, by one call instead of several.
    """
    layers = (first, second) if gate is None else (first, second, gate)
    if not all(plain(layer, Int8Linear) for layer in layers):
        return None
    if any(layer.dynamic != first.dynamic or layer.backend != first.backend for layer in layers):
        return None
    if not (first.dynamic or _few(x, first.backend)) or (gate is not None and gate.bias is not None):
        return None
    x, b1, b2 = as_autocast(x, first.bias, second.bias)
    w1, scale1, gates = first.weight, first.scale, {}
    if gate is first:
        (w1, w3), (scale1, scale3) = w1.chunk(2), scale1.chunk(2)
        gates = {"gate": w3, "gate_scale": scale3}
    elif gate is not None:
        gates = {"gate": gate.weight, "gate_scale": gate.scale}
    return ops.int8_ffn(
        x, w1, scale1, b1, second.weight, second.scale, b2, activation=activation, **gates,
        dynamic=first.dynamic, backend=_offered("int8_ffn", first.backend),
    )  # fmt: skip


def _few(x: Tensor, backend: str | None) -> bool:
    """Whether rows that are not rounded go faster by one call: those of the cpu kernels do."""
    on_cpu = x.device.type == "cpu" and (backend or _backend.forced() or "cpu") == "cpu"
    return on_cpu and _library.certain(math.prod(x.shape[:-1]) <= _FEW)


def _offered(op: str, backend: str | None) -> str | None:
    """As everywhere in nn, a forced backend that has no such kernels is not meant for linear layers."""
    return backend if backend is not None or _backend.offers(op) else "aten"


class Int8MultiheadAttention(MultiheadAttention):
    """MultiheadAttention whose four projections are ``Int8Linear``; the attention itself is as before.

    Args: as of ``MultiheadAttention``, without kdim and vdim, and ``dynamic`` as of ``Int8Linear``.

    Attributes:
        in_proj: Int8Linear (E) -> (3 E), in place of in_proj_weight and in_proj_bias.
        out_proj: Int8Linear (E) -> (E).

    Example:
        >>> attention = Int8MultiheadAttention.from_attention(nn.MultiheadAttention(8, 2, batch_first=True))
        >>> x = torch.randn(2, 5, 8)
        >>> attention(x, x, x)[0].shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        *,
        batch_first: bool = False,
        dynamic: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str | None = None,
    ) -> None:
        factory: Any = {"device": device, "dtype": dtype}
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn,
            batch_first=batch_first, backend=backend, **factory,
        )  # fmt: skip
        # without them torch.nn's layers do not take their fast path, which would read the weights
        for name in ("in_proj_weight", "in_proj_bias"):
            self.register_parameter(name, None)
        self.in_proj = Int8Linear(embed_dim, 3 * embed_dim, bias, dynamic=dynamic, **factory)
        self.out_proj = Int8Linear(embed_dim, embed_dim, bias, dynamic=dynamic, **factory)  # type: ignore[assignment]

    @classmethod
    def from_attention(cls, given: nn.MultiheadAttention, *, dynamic: bool = False) -> Int8MultiheadAttention:
        """The attention with the nearest weights.

        Raises:
            ValueError: ``given`` has a kdim or vdim of its own, or a weight with NaN or an infinity.
        """
        if not given._qkv_same_embed_dim:
            raise ValueError("Int8MultiheadAttention: kdim and vdim must be embed_dim")
        module = cls(
            given.embed_dim,
            given.num_heads,
            given.dropout,
            given.out_proj.bias is not None,
            given.bias_k is not None,
            given.add_zero_attn,
            batch_first=given.batch_first,
            dynamic=dynamic,
            device="meta",  # all of it is replaced: nothing is drawn, and no memory taken
            backend=getattr(given, "backend", None),
        )
        weight, bias = given.in_proj_weight, given.in_proj_bias
        module.in_proj = Int8Linear.from_weight(weight, bias, dynamic=dynamic)
        out = given.out_proj
        module.out_proj = Int8Linear.from_weight(out.weight, out.bias, dynamic=dynamic)  # type: ignore[assignment]
        module.bias_k, module.bias_v = given.bias_k, given.bias_v
        return module.train(given.training)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name in ("weight", "bias"):  # of an attention that is not quantized
            if f"{prefix}in_proj_{name}" in state_dict:
                state_dict[f"{prefix}in_proj.{name}"] = state_dict.pop(f"{prefix}in_proj_{name}")
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _project(
        self, query: Tensor, key: Tensor, value: Tensor, linear: Callable[..., Tensor] = F.linear
    ) -> tuple[Tensor, ...]:
        width, part = self.embed_dim, self.in_proj.part
        if query is key and key is value:
            return self.in_proj(query).unflatten(-1, (3, width)).unbind(-2)
        q = self._project_query(query)
        if key is value:
            return q, *part(key, width, 3 * width).unflatten(-1, (2, width)).unbind(-2)
        return q, part(key, width, 2 * width), part(value, 2 * width, 3 * width)

    def _project_self(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(self._heads(t, 1) for t in self._project(x, x, x))

    def _project_query(self, query: Tensor) -> Tensor:
        return self.in_proj.part(query, 0, self.embed_dim)

    def _reads_parameters(self, query: Tensor) -> bool:
        return False
