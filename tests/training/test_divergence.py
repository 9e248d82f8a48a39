"""What is not finite is never saved: a run that diverges keeps its earlier checkpoints, and JSON holds no NaN."""

import json
from dataclasses import replace

import pytest
import torch

from tests.training import toy
from tfm_kernels import _durable as durable
from tfm_kernels import training
from tfm_kernels.training import checkpoint, loop
from tfm_kernels.training.loss import IGNORED

pytest.importorskip("safetensors")
CONFIG = replace(toy.CONFIG, log_every=100)  # checkpoints at 4, 8 and 12, a logged step at 12 alone


def diverging(monkeypatch, begin):
    """From update ``begin`` on the learning rate is beyond float32."""
    monkeypatch.setattr(loop, "schedule", lambda *_, **__: lambda step: 1.0 if step + 1 < begin else 1e40)


@pytest.mark.parametrize(
    ("begin", "sentence"),
    [
        (6, "the loss is nan at step 8; a lower learning rate may help"),
        (8, "the weights are not finite after step 8; a lower learning rate may help"),
    ],
)
def test_a_diverged_run_keeps_its_earlier_checkpoint_and_can_go_on(tmp_path, monkeypatch, begin, sentence):
    diverging(monkeypatch, begin)
    with pytest.raises(training.InputError) as caught:
        toy.run(tmp_path, CONFIG)
    assert str(caught.value) == sentence
    checkpoints = training.Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.steps() == [4] and checkpoints.latest().best_step == 4
    weights = checkpoint.load_tensors(checkpoints.path(4) / "model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())
    monkeypatch.undo()
    toy.run(tmp_path, CONFIG)
    assert checkpoints.latest().step == 12


class NothingToPredict:
    def __init__(self, data):
        self.data, self.lengths = data, data.lengths

    def batch(self, chosen, epoch):
        inputs, targets = self.data.batch(chosen, epoch)
        return inputs, torch.full_like(targets, IGNORED)


@pytest.mark.filterwarnings("error")
def test_a_loss_of_no_target_is_null(tmp_path):
    data, size = toy.examples()
    config = replace(CONFIG, steps=2, log_every=1)
    result = training.train(
        toy.Toy(size, 0.0), NothingToPredict(data), config, tmp_path, d_model=toy.WIDTH, progress=False
    )
    rows = toy.losses(tmp_path)
    assert [(row["step"], row["loss"], row["tokens"]) for row in rows] == [(1, None, 0), (2, None, 0)]
    assert result["loss"] is None and result["step"] == 2


def test_a_validation_loss_that_is_no_number_is_null_and_never_the_best(tmp_path):
    data, size = toy.examples()
    torch.manual_seed(3)
    model = toy.Toy(size, 0.0)
    arguments = {"d_model": toy.WIDTH, "progress": False}
    empty = NothingToPredict(data)
    result = training.train(model, data, replace(CONFIG, steps=4), tmp_path, validation=empty, **arguments)
    assert result["validation_loss"] is None and result["best_step"] is None and result["best_loss"] is None
    rows = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "metrics.jsonl").open()]
    assert rows[-1] == {"step": 4, "validation_loss": None, "validation_accuracy": None}
    checkpoints = training.Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.best() == checkpoints.path(4)
    result = training.train(model, data, replace(CONFIG, steps=8), tmp_path, validation=data, **arguments)
    assert result["best_step"] == 8 and result["best_loss"] == result["validation_loss"] > 0.0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_json_files_hold_no_word_that_json_has_not(tmp_path, value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        durable.write_json(tmp_path / "config.json", {"rate": value})
    assert not list(tmp_path.iterdir())
    metrics = loop.Metrics(tmp_path / "metrics.jsonl", 0)
    metrics.add({"step": 1, "loss": value})
    metrics.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": null}\n'
