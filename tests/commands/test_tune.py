"""``tune``: it measures a model, keeps what it found, forgets it when asked; bad input is one sentence."""

import json

import pytest

from tfm_kernels import _measured

MODEL = """
import torch
from torch import nn

def build():
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval(), torch.randn(2, 5, 16)

def wrong_call():
    return build()[0], torch.randn(2, 5, 17)

def odd_inputs():
    return build()[0], 3

def no_op():
    return nn.Identity(), torch.randn(2)
"""


@pytest.fixture
def model(tmp_path, quick_tuning):
    path = tmp_path / "my_model.py"
    path.write_text(MODEL)
    return path


def test_a_model_is_measured_and_forgotten(run, model, tmp_path):
    code, out, err = run("tune", f"{model}:build", "--json", tmp_path / "report.json")
    assert code == 0 and f"kept in {_measured.file()}" in out
    measured = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert {row["call"].split()[0] for row in measured} >= {"attention", "add_layer_norm", "ffn"}
    assert all(set(row["seconds"]) == {"aten", "cpu"} for row in measured)
    assert not any({"dropout", "training"} & set(row["call"].split()) for row in measured)
    assert len(_measured.choices("cpu")) == len(measured)
    assert len(err.splitlines()) == len(measured) and "1 of" in err
    assert run("tune", "--forget") == (0, f"deleted {_measured.file()}\n", "")
    assert run("tune", "--forget") == (0, "nothing was measured yet\n", "")
    assert not _measured.choices("cpu")


def test_training_in_another_dtype(run, model):
    code, out, _ = run("tune", f"{model}:build", "--train", "--dtype", "bfloat16")
    assert code == 0
    assert "ffn bfloat16" in out and _measured.choices("cpu")
    assert all(key.endswith(" dropout training") for key in _measured.choices("cpu"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "a target is missing"),
        (("--forget", "{model}:build"), "takes no target"),
        (("{model}:nothing",), "has no function nothing"),
        (("{model}:wrong_call",), "the model cannot be measured ("),
        (
            ("{model}:odd_inputs",),
            "(TypeError: tune: inputs must be a tensor, a tuple or a dict of arguments, got int)",
        ),
        (("{model}:no_op",), "leaves no call of tfm_kernels.ops to automatic choice"),
        (("{model}:build", "--json", "/no/such/folder/x.json"), "a folder that exists"),
        (("{folder}",), "a model folder needs a text file of sentences after it: tune"),
    ],
)
def test_bad_input_is_one_sentence(run, model, words, sentence):
    code, out, err = run("tune", *(word.format(model=model, folder=model.parent) for word in words))
    assert code == 1 and not out and err.count("\n") == 1
    assert err.startswith("python -m tfm_kernels tune: ") and sentence in err
