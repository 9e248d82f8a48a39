"""prove() of a model under torch.compile: what only compiled code gets wrong fails, and what did not run is said."""

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from tests.test_proof_patch import encoder, padded
from tfm_kernels.proof import compiled, prove_patched

NOT_RUN = "it was not run under torch.compile"


def rows(report):
    """The compiled form's rows, by kind and tensor."""
    return {(row.kind, row.module, row.tensor): row for row in report.rows if "compiled" in row.tensor}


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_padded_encoder_runs_packed_and_compiled(dtype):
    report = tfk.prove(encoder().eval(), padded(), dtype=dtype, compile=True)
    assert report.passed, report.table()
    plain = {(row.kind, row.module, row.tensor) for row in report.rows if row.kind in ("output", "gradient")}
    plain = {each for each in plain if "compiled" not in each[2] and "called again" not in each[2]}
    renamed = {(kind, module, tensor.replace(", compiled", "")) for kind, module, tensor in rows(report)}
    assert renamed == plain and len(plain) > 20
    assert any("torch.compile made " in note for note in report.notes)


def test_a_frozen_model_keeps_its_packed_weights_compiled():
    model = encoder().eval()
    tfk.patch(model, freeze=True)
    report = tfk.prove(model, padded(), compile=True)
    assert report.passed and ("output", "", "output, compiled, no_grad") in rows(report), report.table()


class Wrong(nn.Module):
    """A linear layer whose compiled code alone errs: in what it returns, or in its gradient."""

    def __init__(self, linear, what):
        super().__init__()
        self.weight, self.bias, self.what = linear.weight, linear.bias, what

    def forward(self, x):
        y = nn.functional.linear(x, self.weight, self.bias)
        if not torch.compiler.is_compiling():
            return y
        if self.what == "gradient":
            return y + 0.01 * (y - y.detach())
        return y * 1.01 if (self.what == "no_grad") != torch.is_grad_enabled() else y


@pytest.mark.parametrize(
    ("what", "failing"),
    [
        ("no_grad", {("output", "", "output, compiled, no_grad")}),
        ("output", {("output", "", "output, compiled")}),
        ("gradient", {("gradient", "0", f"gradient of {name}, compiled") for name in ("weight", "bias")}),
    ],
)
def test_what_compiled_code_alone_gets_wrong_fails(what, failing):
    def patch(model):
        model[0] = Wrong(model[0], what)

    report = prove_patched(small().eval(), torch.randn(16, 8), patch=patch, compile=True)
    failed = {(row.kind, row.module, row.tensor) for row in report.failures}
    assert failing <= failed and all("compiled" in tensor for _, _, tensor in failed), report.table()
    assert prove_patched(small().eval(), torch.randn(16, 8), patch=patch).passed


def test_buffers_that_compiled_code_changes_are_compared():
    report = tfk.prove(small().train(), torch.randn(16, 8), compile=True)
    assert report.passed, report.table()
    assert {("buffer", "2", f"buffer of {name}, compiled") for name in ("running_mean", "running_var")} <= set(
        rows(report)
    )


def by_torch_compile(model):
    return torch.compile(model)


def by_its_method(model):
    model.compile()
    return model


def in_part(model):
    model[3] = torch.compile(model[3])
    return model


@pytest.mark.parametrize("come", [by_torch_compile, by_its_method, in_part])
def test_a_model_that_comes_compiled_is_proven_so(come):
    model = come(small().eval())
    x = torch.randn(5, 8)
    report = tfk.prove(model, x)
    assert report.passed and ("output", "", "output, compiled") in rows(report), report.table()
    assert report.model == "Sequential" and report.replaced == ["0", "3"]
    assert not rows(tfk.prove(model, x, compile=False))
    assert compiled.is_compiled(model), "the user's own stays as it is"


def test_dropout_is_left_out_and_said():
    report = tfk.prove(encoder().train(), padded(), compile=True)
    assert report.passed and not rows(report)
    assert any(NOT_RUN in note and "evaluation mode" in note for note in report.notes), report.notes
    assert not any(NOT_RUN in note for note in tfk.prove(encoder().train(), padded()).notes)


def test_what_cannot_be_compiled_is_refused(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("no compiler\nand more words")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", lambda model, backend: refuse)
        with pytest.raises(
            RuntimeError, match="^prove: the patched model fails under torch.compile: RuntimeError: no compiler$"
        ):
            tfk.prove(small().eval(), torch.randn(5, 8), compile=True)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", lambda model, backend: model)
        with pytest.raises(RuntimeError, match="torch.compile has compiled nothing"):
            tfk.prove(small().eval(), torch.randn(5, 8), compile=True)
    with pytest.raises(TypeError, match="compile must be True, False or None, got 1"):
        tfk.prove(small(), torch.randn(5, 8), compile=1)
