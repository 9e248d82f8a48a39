"""``quantize``: a copy of a run in 8 bits that the other commands take, and one sentence for what is wrong."""

import json
import shutil

import pytest
import torch

import tfm_kernels as tfk
from tests.commands.conftest import TASKS, largest_file, training
from tests.commands.test_train import refused
from tfm_kernels.training.run_folder import opened

pytest.importorskip("safetensors")
SCHEMES = ["int8_weight_only", "int8_dynamic"]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("task", TASKS)
def test_the_copy_is_the_quantized_model(run, runs, tmp_path, task, scheme):
    """Opened anew it gives the bits of the model that was quantized in this process."""
    code, out, err = run("quantize", runs / task, tmp_path / "int8", "--scheme", scheme)
    assert code == 0 and out.startswith(f"{scheme}: ") and err == f"written to {tmp_path / 'int8'}\n"
    expected, copy = opened(runs / task).model, opened(tmp_path / "int8").model
    report = tfk.quantize(expected, scheme)
    assert not report.kept and len(report.quantized) >= 4
    ids = torch.randint(3, 8, (2, 5), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        inputs = (ids, ids) if task == "translate" else (ids,)
        assert torch.equal(copy(*inputs), expected(*inputs))
    kinds = {t.dtype for t in copy.state_dict().values()}
    assert torch.int8 in kinds and not any(p.requires_grad for p in copy.parameters())


def test_the_other_commands_take_it(run, runs, tmp_path):
    commands = {
        "translate": ["translate", tmp_path / "translate", runs / "en"],
        "classify": ["classify", tmp_path / "classify", runs / "en"],
        "causal-lm": ["generate", tmp_path / "causal-lm", "--prompt", "It", "--tokens", "5"],
    }
    for task, words in commands.items():
        assert run("quantize", runs / task, tmp_path / task)[0] == 0
        code, out, _ = run(*words)
        assert code == 0 and out.strip(), task


def test_its_file_is_smaller(run, runs, tmp_path):
    assert run("quantize", runs / "translate", tmp_path / "int8")[0] == 0
    sizes = [
        next((f / "checkpoints").glob("*/model.safetensors")).stat().st_size
        for f in (runs / "translate", tmp_path / "int8")
    ]
    assert sizes[1] < sizes[0]
    assert not list((tmp_path / "int8").rglob("optimizer.safetensors"))


def test_it_is_not_trained_on(run, runs, tmp_path):
    assert run("quantize", runs / "causal-lm", tmp_path / "int8")[0] == 0
    before = {p: p.read_bytes() for p in (tmp_path / "int8").rglob("*.safetensors")}
    result = run(*training("causal-lm", runs, tmp_path / "int8", "--resume"))
    refused(result, "cannot be continued: its quantization is int8_weight_only, now it is None")
    assert all(path.read_bytes() == held for path, held in before.items())


def test_a_full_disk_is_one_sentence_and_leaves_nothing(run, runs, tmp_path):
    with largest_file(4096):
        refused(run("quantize", runs / "causal-lm", tmp_path / "int8"), "int8 cannot be written (Error while")
    assert not list(tmp_path.iterdir())


def test_what_is_wrong_is_one_sentence(run, runs, tmp_path):
    refused(run("quantize", runs / "nothing", tmp_path / "a"), "is not the folder of a run")
    (tmp_path / "there").mkdir()
    refused(run("quantize", runs / "classify", tmp_path / "there"), "exists; the copy must be a new folder")
    refused(run("quantize", runs / "classify", tmp_path / "a", "--scheme", "int4"), "--scheme: invalid choice: 'int4'")
    assert run("quantize", runs / "classify", tmp_path / "once")[0] == 0
    refused(run("quantize", tmp_path / "once", tmp_path / "twice"), "is quantized already, by int8_weight_only")
    (tmp_path / "file").write_text("")
    refused(run("quantize", runs / "classify", tmp_path / "file" / "x"), "cannot be written")
    assert not (tmp_path / "a").exists() and not (tmp_path / "twice").exists()
    shutil.copytree(tmp_path / "once", tmp_path / "odd")
    settings = json.loads((tmp_path / "odd" / "config.json").read_text()) | {"quantization": "int2"}
    (tmp_path / "odd" / "config.json").write_text(json.dumps(settings))
    refused(
        run("classify", tmp_path / "odd", runs / "en"), "was not written by this version (its quantization is 'int2')"
    )
