"""A run that is killed goes on bit for bit; a checkpoint is whole or not there; a foreign one is refused."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.training import toy
from tfm_kernels import _durable as durable
from tfm_kernels import training
from tfm_kernels.training import checkpoint

pytest.importorskip("safetensors")
ROOT = Path(__file__).resolve().parents[2]
# in turn: before any checkpoint, in a step after one, in its validation, half-written, whole but not renamed,
# renamed while the old one is still there
POINTS = ["batch:3", "batch:13", "validation:1", "write:3", "rename:1", "remove:2"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The losses and weights of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = toy.run(folder)
    torch.set_num_threads(threads)
    return toy.losses(folder), model.state_dict()


def start(folder, *options):
    command = [sys.executable, "-m", "tests.training.toy", str(folder), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_killed_at_any_point_it_goes_on_bit_for_bit(tmp_path, whole):
    for point in POINTS:
        done = start(tmp_path, "--die", point)
        assert done.returncode == -signal.SIGKILL, f"{point}: {done.stderr}"
    assert 0 < training.Checkpoints(tmp_path / "checkpoints").latest().step < toy.CONFIG.steps
    done = start(tmp_path)
    assert done.returncode == 0, done.stderr
    losses, weights = whole
    assert toy.losses(tmp_path) == losses
    assert [row["step"] for row in losses if "loss" in row] == list(range(1, toy.CONFIG.steps + 1))
    found = checkpoint.load_tensors(training.Checkpoints(tmp_path / "checkpoints").path(12) / "model.safetensors")
    assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 4, 5, 9, 13])
def test_killed_from_outside(tmp_path, whole, lines):
    """At whatever it is doing once so many lines of metrics are written."""
    process = subprocess.Popen([sys.executable, "-m", "tests.training.toy", str(tmp_path)], cwd=ROOT)
    metrics, patience = tmp_path / "metrics.jsonl", time.monotonic() + 60
    while process.poll() is None and time.monotonic() < patience:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= lines:
            break
    process.kill()
    process.wait()
    before = metrics.read_bytes().count(b"\n")
    assert start(tmp_path).returncode == 0
    assert lines <= before <= len(whole[0]) and toy.losses(tmp_path) == whole[0]


def test_a_run_without_logits_goes_on_bit_for_bit(tmp_path):
    """In this process; the names in its checkpoints are the model's."""
    for steps in (8, 12):
        model = toy.run(tmp_path / "stopped", replace(toy.CONFIG, steps=steps, schedule="constant"), kind="masked")
    toy.run(tmp_path / "whole", replace(toy.CONFIG, schedule="constant"), kind="masked")
    found = toy.losses(tmp_path / "stopped")
    assert found == toy.losses(tmp_path / "whole") and len(found) == 15
    folder = training.Checkpoints(tmp_path / "stopped" / "checkpoints").path(12)
    weights = checkpoint.load_tensors(folder / "model.safetensors")
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())


def test_a_folder_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    def fill(folder):
        (folder / "one").write_text("1")
        (folder / "two").write_text("2")

    class Killed(BaseException):
        pass

    def kill(*arguments):
        raise Killed

    monkeypatch.setattr(durable.os, "rename", kill)
    with pytest.raises(Killed):
        durable.write_folder(tmp_path / "step-00000004", fill)
    assert training.Checkpoints(tmp_path).steps() == [] and training.Checkpoints(tmp_path).latest() is None
    monkeypatch.undo()
    durable.write_folder(tmp_path / "step-00000004", fill)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["one", "step-00000004", "two"]


def test_a_file_is_the_old_or_the_new_one(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    durable.write_json(path, {"old": True})
    monkeypatch.setattr(durable.os, "replace", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        durable.write_json(path, {"new": True})
    assert "old" in path.read_text()


def test_metrics_lose_the_lines_that_are_computed_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.0}\n{"step": 3, "lo')
    assert [row["step"] for row in toy.loop.curve.read(path)] == [1, 2]
    metrics = toy.loop.Metrics(path, 1)
    metrics.add({"step": 2, "loss": 1.5})
    metrics.close()
    assert path.read_text() == '{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 1.5}\n'


def test_the_newest_and_the_best_are_kept(tmp_path, whole):
    toy.run(tmp_path)
    checkpoints = training.Checkpoints(tmp_path / "checkpoints")
    rows = [row for row in toy.losses(tmp_path) if "validation_loss" in row]
    best = min(rows, key=lambda row: row["validation_loss"])["step"]
    assert checkpoints.steps() == sorted({best, 12}) and checkpoints.best() == checkpoints.path(best)
    assert checkpoints.latest().best_step == best
    pytest.importorskip("matplotlib")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_best_stays_beside_newer_ones(tmp_path):
    data, size = toy.examples()
    model, checkpoints = toy.Toy(size, 0.0), training.Checkpoints(tmp_path)
    for step, best, kept in ((1, 1, [1]), (2, 1, [1, 2]), (3, 1, [1, 3]), (4, 4, [4])):
        checkpoints.save(training.State(step=step, best_step=best), model, training.adamw(model, 0.1))
        assert checkpoints.steps() == kept and checkpoints.best() == checkpoints.path(best)


def test_its_files_have_the_mode_of_any_new_file(tmp_path):
    data, size = toy.examples()
    model = toy.Toy(size, 0.0)
    for number, mask in enumerate((0o022, 0o077, 0o002), 1):
        before = os.umask(mask)
        try:
            training.Checkpoints(tmp_path).save(training.State(step=number), model, training.adamw(model, 0.1))
        finally:
            os.umask(before)
        modes = {path.stat().st_mode & 0o777 for path in training.Checkpoints(tmp_path).path(number).iterdir()}
        assert modes == {0o666 & ~mask}


def test_a_checkpoint_of_another_model_is_one_sentence(tmp_path):
    data, size = toy.examples()
    model = toy.Toy(size, 0.0)
    optimizer = training.adamw(model, 0.1)
    checkpoints = training.Checkpoints(tmp_path)
    checkpoints.save(training.State(step=1), model, optimizer)
    for other, words in (
        (toy.Toy(size + 1, 0.0), f"embedding.weight is ({size}, 16), here ({size + 1}, 16)"),
        (torch.nn.Linear(2, 2), "it lacks bias"),
    ):
        with pytest.raises(training.InputError, match="is a checkpoint of another model") as caught:
            training.load_weights(other, checkpoints.path(1))
        assert words in str(caught.value)
    (checkpoints.path(1) / "model.safetensors").write_bytes(b"\x00" * 7)
    with pytest.raises(training.InputError, match="cannot be read"):
        training.load_weights(model, checkpoints.path(1))
    (checkpoints.path(1) / "state.json").write_text("[]")
    with pytest.raises(training.InputError, match="is not the state of a checkpoint"):
        checkpoints.latest()
