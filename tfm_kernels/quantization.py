"""``quantize``: linear layers of a trained model in 8 bits, for inference."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from . import _check, patching
from .nn import Int8Linear, Int8MultiheadAttention, MultiheadAttention
from .patching import guard

SCHEMES = ("int8_weight_only", "int8_dynamic")
_OUT_PROJ = nn.modules.linear.NonDynamicallyQuantizableLinear


@dataclass(frozen=True)
class QuantizedModule:
    """One linear layer or attention of a model.

    Attributes:
        name: dotted.
        kind: its class before.
        quantized: whether its weights are int8 now.
        note: why not, "" where they are.
    """

    name: str
    kind: str
    quantized: bool
    note: str = ""

    def __str__(self) -> str:
        return f"{self.name}  {self.kind}  {'int8' if self.quantized else f'kept because {self.note}'}"


@dataclass(frozen=True)
class QuantizationReport:
    """What ``quantize`` did to a model.

    Attributes:
        scheme: one of "int8_weight_only", "int8_dynamic".
        entries: one for each linear layer and attention, in the order of ``model.named_modules()``.
        bytes_before: of the model's parameters and buffers, shared ones once.
        bytes_after: the same now.
    """

    scheme: str
    entries: tuple[QuantizedModule, ...]
    bytes_before: int
    bytes_after: int

    @property
    def quantized(self) -> list[QuantizedModule]:
        """Those whose weights are int8 now."""
        return [entry for entry in self.entries if entry.quantized]

    @property
    def kept(self) -> list[QuantizedModule]:
        """Those that are as before."""
        return [entry for entry in self.entries if not entry.quantized]

    def __str__(self) -> str:
        size = f"{self.bytes_before / 2**20:.1f} MiB before, {self.bytes_after / 2**20:.1f} MiB now"
        head = f"{self.scheme}: {len(self.quantized)} of {len(self.entries)} modules in 8 bits; {size}"
        return "\n".join([head, *map(str, self.entries)])


def quantize(
    model: nn.Module, scheme: str = "int8_weight_only", *, skip: Iterable[str] = (), backend: str | None = None
) -> QuantizationReport:
    """Puts the linear layers of a trained model into 8 bits, in place, for inference.

    Every nn.Linear, also inside attention modules of torch.nn and tfm_kernels.nn, and every Conv1D of transformers
    becomes a ``nn.Int8Linear`` with the nearest weights: integers from -127 to 127 times one step for each output
    feature. Embeddings, norms and biases stay as they are, and no parameter asks for a gradient afterwards. A weight
    that the output shares with the embedding is kept as it is there, and in 8 bits in the output. Parameters that no
    linear layer holds, as the experts of transformers' mixtures, stay as they are.

    To save and load: ``state_dict()``, and ``load_state_dict`` of a model that was quantized alike, which also takes
    the weights of one that was not. ``from_pretrained`` of transformers knows no 8-bit layers and would read the
    integers as weights, without an error.

    Args:
        model: any module that is not itself a linear layer. Quantize first, ``patch`` second: the patched model runs
            its int8 layers inside the fused blocks.
        scheme: "int8_weight_only" multiplies the input as it is: for a few rows at a time, as in decoding, where the
            weights' way from memory is the cost. "int8_dynamic" rounds each row of the input to int8 as well: for many
            rows, on processors with VNNI or AMX the fastest.
        skip: names (dotted) of modules to leave alone, with all that is inside them.
        backend: of the int8 layers: "reference" | "aten" | "cpu", or None to choose automatically.

    Returns:
        A QuantizationReport: every linear layer with what became of it, and the bytes.

    Raises:
        TypeError: ``model`` is not a module, or ``skip`` not a list of names.
        ValueError: no scheme or backend has this name, ``skip`` names no module, the model is a linear layer itself or
            is patched, or a weight holds NaN or an infinity or is on the device meta; the model is then as it was.

    Cost: the weights once in float32, one layer after the other.
    Source: Dettmers et al., "LLM.int8()" (2022), section 2.1, without the separate outliers.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
        >>> print(quantize(model, "int8_dynamic", skip=["2"]))
        int8_dynamic: 1 of 2 modules in 8 bits; 0.0 MiB before, 0.0 MiB now
        0  Linear  int8
        2  Linear  kept because it was to be skipped
    """
    skipped = _checked(model, scheme, skip, backend)
    before, dynamic = _nbytes(model), scheme == "int8_dynamic"
    entries: list[QuantizedModule] = []
    made: dict[int, nn.Module] = {}  # by the module before: one that has two places keeps them
    places: list[tuple[nn.Module, str, nn.Module]] = []
    inside: list[str] = []  # of attentions whose layers go with them
    for name, module in model.named_modules(remove_duplicate=False):
        if not _is_linear(module) and not isinstance(module, nn.MultiheadAttention):
            continue
        if any(name.startswith(f"{outer}.") for outer in inside):
            continue
        if isinstance(module, nn.MultiheadAttention):
            inside.append(name)
        note = "it was to be skipped" if _below(name, skipped) else _why_not(module)
        entries.append(QuantizedModule(name, type(module).__name__, note is None, note or ""))
        if note is None:
            if id(module) not in made:
                made[id(module)] = _quantized(name, module, dynamic, backend)
            owner, _, last = name.rpartition(".")
            places.append((model.get_submodule(owner), last, made[id(module)]))
    for place, last, new in places:  # all of them or, where a weight was refused, none
        place._modules[last] = new
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # torch.nn's fast path reads the weights of its layers
    model.requires_grad_(False)
    return QuantizationReport(scheme, tuple(entries), before, _nbytes(model))


def _checked(model: object, scheme: object, skip: object, backend: object) -> tuple[str, ...]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"quantize: model must be a torch.nn.Module, got {type(model).__name__}")
    _check.choice("quantize", "scheme", scheme, SCHEMES)
    if backend is not None:
        _check.choice("quantize", "backend", backend, ("reference", "aten", "cpu"))
    if isinstance(skip, str) or not isinstance(skip, Iterable):
        raise TypeError(f"quantize: skip must be a list of names, got {skip!r}")
    skip = tuple(skip)
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    for name in skip:
        if not isinstance(name, str):
            raise TypeError(f"quantize: skip must be a list of names, got {type(name).__name__} in it")
        if name not in names or not name:
            raise ValueError(f"quantize: skip must name modules of the model, got {name!r}")
    if _is_linear(model) or isinstance(model, nn.MultiheadAttention):
        raise ValueError(
            f"quantize: model must hold its linear layers, got a {type(model).__name__} itself; put it into an "
            "nn.Sequential"
        )
    if patching.settings(model):
        raise ValueError(
            "quantize: model must not be patched; call tfk.unpatch(model), quantize it, and patch it again"
        )
    return skip


def _below(name: str, outer: tuple[str, ...]) -> bool:
    return any(name == other or name.startswith(f"{other}.") for other in outer)


def _is_conv1d(module: nn.Module) -> bool:
    return f"{type(module).__module__}.{type(module).__qualname__}" == guard.CONV1D


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or _is_conv1d(module)


def _why_not(module: nn.Module) -> str | None:
    """None where a module may be replaced by one that has its weights, else why not."""
    inner: list[nn.Module] = [module]
    if isinstance(module, nn.MultiheadAttention):
        if type(module) is Int8MultiheadAttention:
            return "it is in 8 bits already"
        if type(module) not in (nn.MultiheadAttention, MultiheadAttention):
            return f"its class, {type(module).__name__}, may do more than MultiheadAttention"
        if not module._qkv_same_embed_dim:
            return "it has a kdim or vdim of its own"
        if type(module.out_proj) is not _OUT_PROJ:
            return f"its out_proj is {type(module.out_proj).__name__}"
        inner.append(module.out_proj)
    elif type(module) is not nn.Linear and not _is_conv1d(module):
        return f"its class, {type(module).__name__}, may do more than Linear"
    if any(map(guard.hooked, inner)):
        return "it has hooks"
    if not all(map(guard.is_plain, inner)):
        return "its weights are no ordinary tensors, or a hook is registered for all modules"
    if not all(p.is_floating_point() for p in module.parameters()):
        return "its weights are not floating"
    return None


def _quantized(name: str, module: Any, dynamic: bool, backend: str | None) -> nn.Module:
    try:
        if isinstance(module, nn.MultiheadAttention):
            new: nn.Module = Int8MultiheadAttention.from_attention(module, dynamic=dynamic)
            new.in_proj.backend = new.out_proj.backend = backend  # type: ignore[union-attr]
            return new
        weight = module.weight.t() if _is_conv1d(module) else module.weight
        layer = Int8Linear.from_weight(weight, module.bias, dynamic=dynamic, backend=backend)
        return layer.train(module.training)
    except ValueError as error:
        raise ValueError(f"quantize: {name}: {str(error).partition(': ')[2]}") from error


def _nbytes(model: nn.Module) -> int:
    seen = {t.data_ptr() or id(t): t.nbytes for t in (*model.parameters(), *model.buffers())}
    return sum(seen.values())
