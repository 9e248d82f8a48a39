"""Clipping and the loss scale of updates, the mean that a validation is, and which checkpoint is the best."""

from dataclasses import replace

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.training import toy
from tfm_kernels import training
from tfm_kernels.training import loop

pytest.importorskip("safetensors")


@pytest.fixture
def norms():
    """Of each update's gradient, as the optimizer gets it."""
    found = []

    def look(optimizer, *_):
        gradients = [p.grad.flatten() for group in optimizer.param_groups for p in group["params"]]
        scale = getattr(optimizer, "grad_scale", None)  # that a fused one is to take out itself
        found.append(torch.cat(gradients).norm().item() / (1.0 if scale is None else scale.item()))

    hook = register_optimizer_step_pre_hook(look)
    yield found
    hook.remove()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("clip", [0.0, 0.25])
def test_clip_is_the_largest_norm_of_a_gradient_and_0_none(tmp_path, norms, clip, precision):
    toy.run(tmp_path, replace(toy.CONFIG, steps=4, clip=clip, precision=precision))
    whole = [row["gradient_norm"] for row in toy.losses(tmp_path) if "loss" in row]
    assert min(whole) > 0.25
    assert norms == pytest.approx([clip or norm for norm in whole], rel=1e-5)


def test_the_loss_scale_goes_on_where_it_was(tmp_path):
    found = []
    for parts in ([6], [4, 6]):
        folder = tmp_path / str(len(parts))
        for steps in parts:
            toy.run(folder, replace(toy.CONFIG, steps=steps, precision="fp16"))
        found.append(training.Checkpoints(folder / "checkpoints").latest().scaler)
    assert found[0] == found[1] and found[0]["_growth_tracker"] > 2  # more than the updates since it went on


@pytest.mark.parametrize("tokens", [1, 10**6])
def test_a_validation_is_the_mean_over_all_targets(tokens):
    """Without smoothing and dropout; an example that is longer than a batch may be has one of its own."""
    data, size = toy.examples()
    model = toy.Toy(size, 0.5).double()
    sizes = []
    model.register_forward_hook(lambda module, given, scores: sizes.append(len(scores)))
    found = training.evaluate(model.train(), data, replace(toy.CONFIG, tokens=tokens, smoothing=0.3))
    count = len(data.lengths)
    assert sum(sizes) == count and (sizes == [count]) == (tokens > 1)
    losses, right = [], []
    with torch.no_grad():
        for number in range(count):
            (ids,), targets = data.batch([number], 0)
            scores = model.eval()(ids)[0].log_softmax(-1)
            losses += [-row[target].item() for row, target in zip(scores, targets[0], strict=True)]
            right += (scores.argmax(-1) == targets[0]).tolist()
    expected = {"validation_loss": sum(losses) / len(losses), "validation_accuracy": sum(right) / len(right)}
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("losses", "best"), [((2.0, 1.0, 3.0), 8), ((2.0, 2.0, 2.0), 4)])
def test_the_best_is_the_first_checkpoint_of_the_least_loss(tmp_path, monkeypatch, losses, best):
    measured = iter(losses)
    monkeypatch.setattr(loop, "evaluate", lambda *_: {"validation_loss": next(measured)})
    toy.run(tmp_path)
    latest = training.Checkpoints(tmp_path / "checkpoints").latest()
    assert (latest.best_step, latest.best_loss) == (best, min(losses))
