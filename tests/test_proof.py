"""prove(): identical and honest models pass; every planted defect fails and is named."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfm_kernels as tfk
from tfm_kernels.patching import copying
from tfm_kernels.proof import prove_patched

DTYPES = [torch.float32, torch.bfloat16]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention(32, 4, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.ffn = FeedForward()

    def forward(self, x, padding=None):
        x = self.norm1(x + self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0])
        return self.norm2(x + self.ffn(x))


class Attention(nn.MultiheadAttention):
    pass


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, 5)

    def forward(self, x, padding=None):
        for block in self.blocks:
            x = block(x, padding)
        return {"hidden": x, "logits": self.head(x)}


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = Model().eval()
    for name, parameter in model.named_parameters():
        if "bias" in name or "norm" in name:
            nn.init.normal_(parameter, 1.0 if name.endswith("weight") else 0.0, 0.3)
    return model


def inputs():
    generator = torch.Generator().manual_seed(1)
    padding = torch.zeros(12, 40, dtype=torch.bool)
    padding[::3, 25:] = True
    return {"x": torch.randn(12, 40, 32, generator=generator), "padding": padding}


# What a good patch might do, and what bad ones do. Each takes a module's class; the forward is all that changes.


class Norm(nn.LayerNorm):
    def forward(self, x):
        return tfk.ops.layer_norm(x, self.weight, self.bias, self.eps, backend="cpu")


class TooLarge(nn.LayerNorm):
    def forward(self, x):  # before it is rounded, so that bfloat16 keeps it
        w, b = self.weight.float(), self.bias.float()
        return (F.layer_norm(x.float(), (32,), w, b, self.eps) * 1.001).to(x.dtype)


class NoBias(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, (32,), self.weight, None, self.eps)


class LeakyMask(Attention):
    def forward(self, q, k, v, key_padding_mask=None, **kwargs):
        if key_padding_mask is not None:
            key_padding_mask = F.pad(key_padding_mask, (1, 0))[:, :-1]  # one key too many is seen
        return super().forward(q, k, v, key_padding_mask=key_padding_mask, **kwargs)


class WrongGradient(FeedForward):
    def forward(self, x):
        hidden = F.relu(self.fc1(x))
        return self.fc2(hidden.detach() + 1.01 * (hidden - hidden.detach()))


class NoBiasGradient(FeedForward):
    def forward(self, x):
        return F.linear(F.relu(self.fc1(x)), self.fc2.weight, self.fc2.bias.detach())


class NotANumber(nn.LayerNorm):
    def forward(self, x):
        y = super().forward(x).clone()
        y[3, 5, 7] = torch.nan
        return y


class OtherShape(FeedForward):
    def forward(self, x):
        return super().forward(x).flatten(0, 1).view(40, 12, 32).transpose(0, 1)[:, :1]


class Failing(FeedForward):
    def forward(self, x):
        raise ValueError("no kernel for this")


DEFECTS = {
    "0.1 % too large": ("blocks.1.norm2", TooLarge),
    "bias dropped": ("blocks.0.norm1", NoBias),
    "one padded key seen": ("blocks.1.attention", LeakyMask),
    "gradient 1 % too large, output right": ("blocks.1.ffn", WrongGradient),
    "bias without gradient": ("blocks.1.ffn", NoBiasGradient),
    "one NaN": ("blocks.0.norm2", NotANumber),
    "other shape": ("blocks.1.ffn", OtherShape),
}


def honest(model):
    for module in model.modules():
        if type(module) is nn.LayerNorm:
            module.__class__ = Norm


def spoiled(name, cls):
    def patch(model):
        honest(model)
        model.get_submodule(name).__class__ = cls

    return patch


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("defect", DEFECTS)
def test_every_planted_defect_fails_and_is_named(model, defect, dtype):
    name, cls = DEFECTS[defect]
    report = prove_patched(model, inputs(), dtype=dtype, patch=spoiled(name, cls))
    assert not report.passed
    assert report.culprits == [name], report.table()
    assert f"FAILED in {name}" in str(report) and "FAIL" in report.table()


def test_a_patched_model_that_raises_says_so(model):
    with pytest.raises(
        RuntimeError, match="prove: the patched Model fails where the original runs: ValueError: no kernel for this"
    ):
        prove_patched(model, inputs(), patch=spoiled("blocks.0.ffn", Failing))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_an_honest_patch_passes_in_every_dtype(model, dtype):
    report = prove_patched(model, inputs(), dtype=dtype, count=1, patch=honest)
    assert report.passed, report.table()
    assert len(report.replaced) == 4 and {row.kind for row in report.rows} == {"output", "gradient", "step", "module"}
    assert sum(row.kind == "gradient" for row in report.rows) == len(list(model.parameters()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_identical_models_pass_and_the_report_says_that_nothing_was_replaced(model, dtype):
    report = prove_patched(model, inputs(), dtype=dtype, count=1, patch=lambda m: None)
    assert report.passed and all(row.ratio == 1.0 for row in report.rows if "no_grad" not in row.tensor)
    assert "nothing was replaced" in report.notes[0]


def test_drop_ins_in_both_models_are_told():
    report = tfk.prove(nn.Sequential(tfk.nn.LayerNorm(8), nn.LayerNorm(8)), torch.randn(3, 8))
    assert report.passed and report.replaced == ["1"]
    assert "both models hold modules of tfm_kernels.nn (1), not compared with PyTorch's" in report.notes


def test_a_defect_shows_in_the_training_steps_too(model):
    report = prove_patched(model, inputs(), count=1, patch=spoiled("blocks.1.ffn", WrongGradient))
    assert any(row.kind == "step" and not row.passed for row in report.rows)


def test_a_module_that_cannot_be_told_by_its_class_is_told_by_its_gradients(model):
    def patch(model):
        model.head.bias.data[2] += 0.01

    report = prove_patched(model, inputs(), patch=patch)
    assert not report.passed and report.culprits == ["the model"] and "output.logits" in str(report.worst)


def test_the_model_is_left_alone(model):
    model.train()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    prove_patched(model, inputs(), count=1, patch=honest)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert (
        model.training
        and all(p.grad is None for p in model.parameters())
        and type(model.blocks[0].norm1) is nn.LayerNorm
    )
    assert torch.equal(state, torch.get_rng_state())


def test_a_loss_and_inputs_with_gradients(model):
    given = {**inputs(), "x": inputs()["x"].requires_grad_()}
    loss = lambda output: F.cross_entropy(output["logits"].flatten(0, 1), torch.arange(480) % 5)
    report = prove_patched(model, given, loss_fn=loss, count=1, patch=honest)
    assert report.passed, report.table()
    assert any(row.module == "input" for row in report.rows)
    with pytest.raises(ValueError, match="loss_fn must return a tensor of one element, got a tensor of shape"):
        prove_patched(model, given, loss_fn=lambda output: output["hidden"], patch=honest)


def test_a_model_whose_only_output_is_its_loss(model):
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return F.cross_entropy(self.model(x)["logits"].flatten(0, 1), torch.arange(480) % 5)

    for dtype in (torch.float32, torch.bfloat16):
        report = prove_patched(WithLoss(), inputs()["x"], dtype=dtype, count=1, patch=honest)
        assert report.passed, report.table()
    report = prove_patched(WithLoss(), inputs()["x"], patch=spoiled("model.blocks.1.norm2", TooLarge))
    assert report.culprits == ["model.blocks.1.norm2"]


def test_the_report_as_text_and_json(model):
    report = prove_patched(model, inputs(), dtype=torch.bfloat16, patch=spoiled("blocks.1.norm2", TooLarge))
    told = json.loads(report.to_json())
    assert told["passed"] is False and told["culprits"] == ["blocks.1.norm2"] and told["dtype"] == "bfloat16"
    assert len(told["rows"]) == len(report.rows) and "blocks.1.norm2" in told["worst"]
    assert "blocks.1.norm2" in report.table() and str(report) in report.table()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": 3}, TypeError, "prove: model must be a torch.nn.Module, got int"),
        ({"inputs": "text"}, TypeError, "prove: inputs must be a tensor, a tuple or a dict of arguments, got str"),
        ({"dtype": torch.int8}, ValueError, "prove: dtype must be .*, got torch.int8"),
        ({"steps": -1}, ValueError, "prove: steps must be an integer >= 0, got -1"),
        ({"limit": 0.5}, ValueError, "prove: limit must be a finite number >= 1, got 0.5"),
        ({"loss_fn": 1}, TypeError, "prove: loss_fn must be a function or None, got int"),
    ],
)
def test_bad_arguments(model, change, error, message):
    arguments = {"model": model, "inputs": inputs(), **change}
    with pytest.raises(error, match=message):
        tfk.prove(arguments.pop("model"), arguments.pop("inputs"), **arguments)


class OnMPS(torch.Tensor):
    """A tensor that says it is on a Mac's GPU, and holds nothing."""

    @staticmethod
    def __new__(cls, *shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device="mps")

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function)


def test_what_has_no_float64_is_refused(model):
    model.register_buffer("there", OnMPS(3))
    with pytest.raises(ValueError, match="prove: MPS has no float64, .*; move the model and its inputs to the CPU"):
        tfk.prove(model, inputs())


def test_a_wrong_call_raises_the_originals_own_error(model):
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        tfk.prove(model, {"y": torch.ones(1)})


class Closing(nn.Module):
    """Runs its layers from a function that holds them, as minGPT's blocks do."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"norm": nn.LayerNorm(8), "linear": nn.Linear(8, 8)})
        m, weight, later = self.parts, self.parts["linear"].weight, None
        self.run = lambda x: m["linear"](m["norm"](x)) + x @ weight if later is None else later
        self.plain = lambda x: x

    def forward(self, x):
        return self.plain(self.run(x))


def test_a_model_that_keeps_functions_of_its_layers():
    """A copy's function ran the model's own layers: float32 beside float64, and unpatched."""
    torch.manual_seed(0)
    model = Closing()
    before, run = copy.deepcopy(model.state_dict()), model.run
    report = tfk.prove(model, (torch.randn(4, 8),), steps=1)
    assert report.passed and {"parts.norm", "parts.linear"} <= set(report.replaced), report.table()
    assert model.run is run and all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    copied = copying.copied(model)
    assert copied.plain is model.plain and copied.run is not run
    with torch.no_grad():
        copied.parts["linear"].weight.zero_()
        copied.parts["linear"].bias.fill_(3.0)
        assert torch.equal(copied(torch.randn(4, 8)), torch.full((4, 8), 3.0))
