"""Whole models of torch.nn, patched, are proven and timed eager and compiled; and what tune() chooses for one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import tfm_kernels as tfk
from tfm_kernels import _measured
from tfm_kernels.bench.model import BOTH, compare
from tfm_kernels.bench.record import Results

from .part import RED, Item, Room

Inputs = dict[str, Tensor]
SECONDS = 4.0  # of timing, for each model
BACKENDS = (None, "triton")  # None: automatic choice


@dataclass(frozen=True)
class Size:
    """Of a model and its batch, whose every second sequence is half padding."""

    d_model: int = 512
    nhead: int = 8
    dim_feedforward: int = 2048
    layers: int = 6
    rows: int = 32
    length: int = 256
    dtype: torch.dtype = torch.bfloat16


_USUAL = Size()


def encoder(size: Size, dropout: float) -> tuple[nn.Module, Inputs]:
    """A padded batch through an encoder."""
    layer = nn.TransformerEncoderLayer(*_widths(size), dropout, "gelu", batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
    return model, {"src": _tokens(size), "src_key_padding_mask": _padding(size)}


def transformer(size: Size, dropout: float) -> tuple[nn.Module, Inputs]:
    """An encoder and a decoder, which sees neither what is to come nor padding."""
    model = nn.Transformer(
        size.d_model, size.nhead, size.layers, size.layers, size.dim_feedforward, dropout, batch_first=True
    )
    return model, {
        "src": _tokens(size),
        "tgt": _tokens(size),
        "tgt_mask": torch.ones(size.length, size.length).triu(1).bool(),
        "src_key_padding_mask": _padding(size),
        "memory_key_padding_mask": _padding(size),
    }


# name -> (model and its inputs, dropout, whether it is trained)
MODELS: dict[str, tuple[Callable[[Size, float], tuple[nn.Module, Inputs]], float, bool]] = {
    "encoder": (encoder, 0.1, False),
    "encoder, training without dropout": (encoder, 0.0, True),
    "encoder, training": (encoder, 0.1, True),
    "transformer": (transformer, 0.1, False),
    "transformer, training without dropout": (transformer, 0.0, True),
}


def items(room: Room, results: Results, size: Size = _USUAL) -> Iterator[Item]:
    for backend in BACKENDS:
        for name, (build, dropout, train) in MODELS.items():
            made = partial(_made, build, size, dropout, room.device)
            yield Item(f"{backend or 'auto'} {name}", partial(_compared, made, train, backend, size.dtype))
    yield Item("tune encoder", partial(_tuned, partial(_made, encoder, size, 0.1, room.device), room.folder))


def _compared(
    made: Callable[[], tuple[nn.Module, Inputs]], train: bool, backend: str | None, dtype: torch.dtype
) -> dict[str, Any]:
    """What compare() found; red where the proof fails or torch.compile refuses the patched model."""
    _measured.ignore()  # the choice that ships
    model, inputs = made()
    tfk.patch(model, backend=backend)
    report = compare(model, inputs, dtype=dtype, train=train, compiled=True, seconds=SECONDS)
    found = {
        "proof": str(report.proof),
        "notes": report.proof.notes,
        "runners": [asdict(runner) for runner in report.runners],
        "problems": report.problems,
    }
    if not report.proof.passed:
        return {"state": RED, "why": str(report.proof), **found}
    return {"state": RED, "why": report.problems[BOTH], **found} if BOTH in report.problems else found


def _tuned(made: Callable[[], tuple[nn.Module, Inputs]], folder: Path) -> dict[str, Any]:
    """tune()'s report, whose table goes beside the results instead of to the user's own."""
    model, inputs = made()
    tfk.patch(model.eval())
    with mock.patch.object(_measured, "file", lambda: folder / "tuned.json"), torch.no_grad():
        report = tfk.tune(model, inputs)
    _measured.ignore()
    return {"tuned": json.loads(report.to_json())}


def _made(
    build: Callable[[Size, float], tuple[nn.Module, Inputs]], size: Size, dropout: float, device: str
) -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    model, inputs = build(size, dropout)
    floats = {name: value.to(size.dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    return model.to(device, size.dtype), {name: value.to(device) for name, value in floats.items()}


def _widths(size: Size) -> tuple[int, int, int]:
    return size.d_model, size.nhead, size.dim_feedforward


def _tokens(size: Size) -> Tensor:
    return torch.randn(size.rows, size.length, size.d_model)


def _padding(size: Size) -> Tensor:
    lengths = torch.where(torch.arange(size.rows) % 2 == 0, size.length, size.length // 2)
    return torch.arange(size.length) >= lengths.unsqueeze(1)
