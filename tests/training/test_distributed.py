"""Two processes, started as torchrun starts them, compute what one computes: DDP and FSDP2 on the CPU with gloo."""

import socket
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from tests.training import toy
from tfm_kernels import training
from tfm_kernels.training import Processes, loop
from tfm_kernels.training.loss import counted

pytest.importorskip("safetensors")
ROOT = Path(__file__).resolve().parents[2]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(folder, *options):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    command = [*torchrun, "--master-port", str(free_port()), "-m", "tests.training.toy", str(folder), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)


@pytest.fixture(scope="module")
def alone_of(tmp_path_factory):
    """The losses of one process, of each kind of model."""
    found = {}
    for kind in toy.KINDS:
        folder = tmp_path_factory.mktemp(kind)
        toy.run(folder, dropout=0.0, kind=kind)
        found[kind] = toy.losses(folder)
    return found


@pytest.fixture
def alone(alone_of):
    return alone_of["causal"]


def same(found, expected):
    """Rounding apart: the parts of a sum are added in another order, and twelve updates carry it on."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for key in other:
            assert one[key] == pytest.approx(other[key], rel=2e-4), (key, one, other)


@pytest.mark.parametrize(
    "strategy, kind",
    [
        pytest.param(strategy, kind, marks=() if (strategy == "fsdp") == (kind == "causal") else pytest.mark.slow)
        for strategy in ("ddp", "fsdp")
        for kind in toy.KINDS
    ],
)
def test_two_processes_have_the_losses_of_one(tmp_path, alone_of, strategy, kind):
    """Of the masked model also where a process's part of an update has no target."""
    options = "--strategy", strategy, "--dropout", "0", "--accumulation", "2", "--kind", kind
    done = launch(tmp_path, *options)
    assert done.returncode == 0, done.stderr[-3000:]
    same(toy.losses(tmp_path), alone_of[kind])


def test_a_process_has_parts_without_a_target():
    """What the test above is about."""
    data, _ = toy.masked()
    batches = training.TokenBatches(data.lengths, toy.CONFIG.tokens, toy.CONFIG.seed).after(training.Position())
    steps = [(epoch, chosen) for epoch, chosen, _ in islice(batches, toy.CONFIG.steps)]
    parts = [loop._parts(data, chosen, epoch, 2, Processes(1, 2)) for epoch, chosen in steps]
    found = [[bool(counted(targets)) for _, targets in update] for update in parts]
    assert [True, False] in found and [False, False] in found


@pytest.mark.slow
@pytest.mark.parametrize("kind", toy.KINDS)
def test_fsdp_killed_goes_on_bit_for_bit(tmp_path, kind):
    done = launch(tmp_path / "killed", "--strategy", "fsdp", "--die", "batch:13", "--kind", kind)
    assert done.returncode != 0
    for folder in ("killed", "whole"):
        done = launch(tmp_path / folder, "--strategy", "fsdp", "--kind", kind)
        assert done.returncode == 0, done.stderr[-3000:]
    assert toy.losses(tmp_path / "killed") == toy.losses(tmp_path / "whole")


def test_accumulation_has_the_losses_of_the_whole_batch(tmp_path, alone):
    toy.run(tmp_path, replace(toy.CONFIG, accumulation=3), dropout=0.0)
    same(toy.losses(tmp_path), alone)


@pytest.mark.parametrize("kind", toy.KINDS)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_learns_as_float32_does(tmp_path, alone_of, precision, kind):
    alone = alone_of[kind]
    model = toy.run(tmp_path, replace(toy.CONFIG, precision=precision), dropout=0.0, kind=kind)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    final = [
        [row["validation_loss"] for row in rows if "validation_loss" in row][-1]
        for rows in (toy.losses(tmp_path), alone)
    ]
    assert final[0] == pytest.approx(final[1], rel=0.02)
    scale = toy.training.Checkpoints(tmp_path / "checkpoints").latest().scaler
    assert bool(scale) == (precision == "fp16")
