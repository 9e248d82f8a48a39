"""A model beside its patched self, where no command is needed to see it: its inputs, its copies, a GPU's samples."""

import contextlib

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from tfm_kernels.bench import model
from tfm_kernels.patching import settings


@pytest.fixture
def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


def test_the_users_model_is_left_as_it_was(encoder):
    x = torch.randn(2, 5, 16)
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    report = model.compare(encoder, {"src": x}, dtype=torch.bfloat16, seconds=0.0)
    assert report.proof.passed and report.proof.dtype == "bfloat16" and len(report.runners) == 2
    assert encoder.training and not settings(encoder)
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
    tfk.patch(encoder)
    state = torch.get_rng_state()
    assert model.compare(encoder, x, train=True, seconds=0.0).training and len(settings(encoder)) == 1
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_functions_of_the_model_hold_is_copied(dtype):
    torch.manual_seed(0)
    block = nn.ModuleDict({"norm": nn.LayerNorm(8), "first": nn.Linear(8, 16), "second": nn.Linear(16, 8)})
    block.forward = lambda x: block["second"](block["first"](block["norm"](x)).relu())
    report = model.compare(block.to(dtype).eval(), torch.randn(5, 8), dtype=torch.float32, seconds=0.0)
    assert report.proof.passed and len(report.runners) == 2
    assert all(parameter.grad is None for parameter in block.parameters())


def test_a_model_of_torch_nn_itself_is_compiled(encoder, monkeypatch):
    """`Module.compile` compiles nothing of it, and says nothing; what compiles nothing is not timed."""
    report = model.compare(encoder.eval(), torch.randn(2, 5, 16), compiled=True, seconds=0.0)
    assert [runner.name for runner in report.runners] == list(model.RUNNERS) and not report.problems
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    report = model.compare(encoder, torch.randn(2, 5, 16), compiled=True, seconds=0.0)
    assert [runner.name for runner in report.runners] == [model.STOCK, model.PATCHED]
    assert set(report.problems) == {model.COMPILED, model.BOTH} and "nothing" in report.problems[model.COMPILED]


def test_an_output_of_several_parts_is_differentiated_whole():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return {"first": self.a(x), "rest": (self.b(x), x.argmax())}

    two, x = Two(), torch.randn(3, 4, requires_grad=True)
    gradients = {}
    for name, leaf in [*two.named_parameters(), ("x", x)]:
        leaf.register_hook(lambda gradient, name=name: gradients.setdefault(name, []).append(gradient))
    step = model.Step(two, model.Call((x,), {}), None)
    step()
    step()
    assert set(gradients) == {"a.weight", "a.bias", "b.weight", "b.bias", "x"}
    for first, again in gradients.values():
        assert first.abs().sum() > 0 and torch.equal(first, again), "each step differentiates the same"
    assert x.grad is None and two.a.weight.grad is None


def test_samples_of_a_gpu_wait_for_it_and_its_memory_is_its_own(encoder, monkeypatch):
    """There is none: what torch.cuda would be asked is answered here."""
    gpu, waits, seen, forked = torch.device("cuda", 0), [], [], []
    monkeypatch.setattr(model, "_gpus", lambda *_: [gpu])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 4000)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: forked.append(devices) or contextlib.nullcontext())
    real = model.interleaved.race_calls

    def race_calls(*args, **kwargs):
        before = len(waits)
        found = real(*args, **kwargs)
        seen.append(len(waits) - before)
        return found

    monkeypatch.setattr(model.interleaved, "race_calls", race_calls)
    report = model.compare(encoder, torch.randn(2, 5, 16), seconds=0.0)
    assert seen == [2 * (1 + 2 + 1 + 3)] and set(waits) == {gpu}
    assert [runner.memory for runner in report.runners] == [3000, 3000] and forked[-1] == [gpu]
    assert report.environment["gpu"] == "a GPU" and " on a GPU, torch " in report.table()
