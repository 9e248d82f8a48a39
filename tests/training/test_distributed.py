"""Two processes, started as torchrun starts them, compute what one computes: DDP and FSDP2 on the CPU with gloo."""

import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.training import toy

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
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    toy.run(folder, dropout=0.0)
    return toy.losses(folder)


def same(found, expected):
    """Rounding apart: the parts of a sum are added in another order, and twelve updates carry it on."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for key in other:
            assert one[key] == pytest.approx(other[key], rel=2e-4), (key, one, other)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_have_the_losses_of_one(tmp_path, alone, strategy):
    options = "--strategy", strategy, "--dropout", "0", "--accumulation", "2"
    done = launch(tmp_path, *options)
    assert done.returncode == 0, done.stderr[-3000:]
    same(toy.losses(tmp_path), alone)


@pytest.mark.slow
def test_fsdp_killed_goes_on_bit_for_bit(tmp_path):
    done = launch(tmp_path / "killed", "--strategy", "fsdp", "--die", "batch:13")
    assert done.returncode != 0
    for folder in ("killed", "whole"):
        done = launch(tmp_path / folder, "--strategy", "fsdp")
        assert done.returncode == 0, done.stderr[-3000:]
    assert toy.losses(tmp_path / "killed") == toy.losses(tmp_path / "whole")


def test_accumulation_has_the_losses_of_the_whole_batch(tmp_path, alone):
    toy.run(tmp_path, replace(toy.CONFIG, accumulation=3), dropout=0.0)
    same(toy.losses(tmp_path), alone)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_learns_as_float32_does(tmp_path, alone, precision):
    model = toy.run(tmp_path, replace(toy.CONFIG, precision=precision), dropout=0.0)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    final = [
        [row["validation_loss"] for row in rows if "validation_loss" in row][-1]
        for rows in (toy.losses(tmp_path), alone)
    ]
    assert final[0] == pytest.approx(final[1], rel=0.02)
    scale = toy.training.Checkpoints(tmp_path / "checkpoints").latest().scaler
    assert bool(scale) == (precision == "fp16")
