"""``export``: a run, a function's model or a Hugging Face folder as a file that gives its numbers; else a sentence."""

import onnx
import onnxruntime
import pytest
import torch

from tests.commands.test_train import refused
from tests.patching import models
from tfm_kernels.training import run_folder

pytest.importorskip("safetensors")

MODEL = """
import torch
from torch import nn

def build():
    return nn.Linear(8, 4), torch.randn(2, 8)

def wrong_call():
    return nn.Linear(8, 4), torch.randn(2, 7)

class Looks(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x

def looks():
    return Looks(), torch.randn(2, 8)

def half():
    return nn.Linear(8, 4).half(), torch.randn(2, 8)
"""


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "my_model.py"
    path.write_text(MODEL)
    return path


def outputs(path, ids):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {port.name: x.numpy() for port, x in zip(session.get_inputs(), ids, strict=True)})


@pytest.mark.parametrize("task", ["translate", "classify", "masked-lm", "causal-lm"])
def test_a_run_of_every_task(run, runs, tmp_path, task):
    path = tmp_path / "model.onnx"
    code, out, err = run("export", runs / task, path)
    assert code == 0 and str(path) in out and "onnxruntime" in out and "batch, sequence" in out
    assert [line.rpartition(": ")[2] for line in err.splitlines()][:2] == ["copying", "tracing"]
    trained = run_folder.opened(runs / task).model.cpu()
    ids = [torch.tensor([[5, 6, 7, 8, 9, 10, 0], [0, 5, 6, 0, 7, 8, 9]])] * (2 if task == "translate" else 1)
    with torch.no_grad():
        expected = trained(*ids)
    found = torch.from_numpy(outputs(path, ids)[0])
    assert found.shape == expected.shape and torch.equal(found.argmax(-1), expected.argmax(-1))


def test_a_function_of_a_file_with_fixed_sizes_and_another_opset(run, model, tmp_path):
    code, out, _ = run("export", f"{model}:build", tmp_path / "model.onnx", "--fixed", "--opset", 18)
    assert code == 0 and "input   input float32 (2, 8)" in out
    file = onnx.load(tmp_path / "model.onnx")
    assert file.opset_import[0].version == 18 and len(file.graph.input) == 1


def test_a_model_folder_with_sentences(run, tmp_path):
    hf = models.transformers()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "sat"]
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "vocab.txt").write_text("\n".join(words))
    models.bert(num_hidden_layers=1).save_pretrained(tmp_path / "bert")
    hf.BertTokenizerFast(str(tmp_path / "bert" / "vocab.txt")).save_pretrained(tmp_path / "bert")
    (tmp_path / "text").write_text("a cat\na cat sat\n")
    code, out, _ = run("export", tmp_path / "bert", tmp_path / "text", tmp_path / "model.onnx")
    assert code == 0 and "input   input_ids int64 (batch, sequence)" in out and "output  last_hidden_state" in out
    refused(run("export", tmp_path / "bert", tmp_path / "model.onnx"), "a model folder needs a text file of sentences")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("{model}:build", "{folder}/absent/model.onnx"), "model.onnx cannot be used (No such file or directory)"),
        (("{model}:build", "{folder}"), "cannot be used (Is a directory)"),
        (("{model}:build", "{path}", "--opset", "9"), "opset must be an integer from 18 to 23, got 9"),
        (("{model}:wrong_call", "{path}"), "Linear cannot run example_inputs (RuntimeError: "),
        (("{model}:looks", "{path}"), "by torch.export (its code asks for the values of a tensor)"),
        (("{model}:half", "{path}"), "model must be float32 or float64, got float16"),
        (("{model}:nothing", "{path}"), "has no function nothing"),
        (("absent", "{path}"), "the target must be file.py:function, module:function or a model folder"),
        (("{runs}/classify", "{model}", "{path}"), "holds a run, whose export takes no sentences"),
    ],
)
def test_what_is_wrong_is_one_sentence(run, runs, model, tmp_path, words, sentence):
    path = tmp_path / "model.onnx"
    places = {"model": model, "runs": runs, "folder": tmp_path, "path": path}
    before = sorted(tmp_path.iterdir())
    code, out, err = run("export", *(word.format(**places) for word in words))
    stages = ("copying", "tracing", "translating", "writing")
    told = "".join(line for line in err.splitlines(keepends=True) if not line.rstrip().endswith(stages))
    refused((code, out, told), sentence)
    assert [each for each in sorted(tmp_path.iterdir()) if each.name != "__pycache__"] == before


def test_usage_is_one_sentence(run):
    refused(run("export", "run"), "the following arguments are required: model.onnx")
