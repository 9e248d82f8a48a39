"""``classify``: a label for each line, and one sentence for what is wrong."""

import io
import json
import shutil
import sys

import pytest

from tests.commands.test_train import refused

pytest.importorskip("safetensors")


def test_every_line_gets_a_label_and_a_probability(run, runs, monkeypatch):
    code, out, _ = run("classify", runs / "classify", runs / "en")
    rows = [line.split("\t") for line in out.splitlines()]
    assert code == 0 and [row[2] for row in rows] == (runs / "en").read_text().split("\n")[:-1]
    assert all(row[0] in ("pet", "beast") and 0.5 <= float(row[1]) <= 1.0 for row in rows)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a cat\n")))
    assert run("classify", runs / "classify", "-")[1] == "\t".join(rows[0]) + "\n"


@pytest.mark.parametrize("lines", [2, 6])
def test_labelled_lines_give_the_accuracy(run, runs, monkeypatch, lines):
    """Over all batches of so many lines."""
    monkeypatch.setattr("tfm_kernels.commands.classify.TOKENS", lines * 32)  # texts have up to 32 tokens
    code, out, err = run("classify", runs / "classify", runs / "tsv", "--labelled")
    truth = [line.split("\t")[1] for line in (runs / "tsv").read_text().splitlines()]
    right = sum(line.split("\t")[0] == label for line, label in zip(out.splitlines(), truth, strict=True))
    assert code == 0 and err == f"accuracy {right / 6:.4f} ({right} of 6)\n"


@pytest.mark.parametrize(
    ("folder", "text", "sentence"),
    [
        ("translate", "en", "holds a run of `train translate`; this needs one of `train classify`"),
        ("nothing", "en", "is not the folder of a run: it holds no config.json"),
        ("classify", "nothing", "cannot be read (No such file or directory)"),
    ],
)
def test_a_bad_run_or_file_is_one_sentence(run, runs, folder, text, sentence):
    refused(run("classify", runs / folder, runs / text), sentence)


def test_a_damaged_run_is_one_sentence(run, runs, tmp_path):
    (tmp_path / "config.json").write_text('{"format": 7}')
    refused(run("classify", tmp_path, runs / "en"), "was not written by this version")
    for name in ("config.json", "text.json"):
        (tmp_path / name).write_bytes((runs / "classify" / name).read_bytes())
    refused(run("classify", tmp_path, runs / "en"), "holds no checkpoint")
    (tmp_path / "checkpoints").symlink_to(runs / "masked-lm" / "checkpoints")
    refused(run("classify", tmp_path, runs / "en"), "is a checkpoint of another model")
    (tmp_path / "text.json").write_text("{}")
    refused(run("classify", tmp_path, runs / "en"), "is not a vocabulary of this library")


def test_texts_that_are_cut_are_told(run, runs, tmp_path):
    assert "longer than the run's --max-length is cut" in " ".join(run("classify", "--help")[1].split())
    (tmp_path / "text").write_text("a" * 30 + "\n" + "a" * 31 + "\n")
    code, out, err = run("classify", runs / "classify", tmp_path / "text")
    assert code == 0 and len(out.splitlines()) == 2 and err == "1 line of more than 30 tokens was cut\n"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda settings: settings.pop("vocabularies"), "(it lacks 'vocabularies')"),
        (lambda settings: settings.pop("model"), "(it lacks 'model')"),
        (lambda settings: settings["model"].pop("max_length"), "(it lacks 'max_length')"),
        (lambda settings: settings.update(model=None), "(its model is None)"),
        (lambda settings: settings["labels"].pop(), "(it has 1 labels for 2 classes)"),
    ],
)
def test_a_damaged_configuration_is_one_sentence(run, runs, tmp_path, change, sentence):
    shutil.copytree(runs / "classify", tmp_path / "run")
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    change(settings)
    (tmp_path / "run" / "config.json").write_text(json.dumps(settings))
    refused(run("classify", tmp_path / "run", runs / "en"), f"was not written by this version {sentence}")


def test_a_vocabulary_of_another_run_is_one_sentence(run, runs, tmp_path):
    shutil.copytree(runs / "classify", tmp_path / "run")
    shutil.copy(runs / "causal-lm" / "text.json", tmp_path / "run" / "text.json")
    refused(run("classify", tmp_path / "run", runs / "en"), "text.json is of another run: it has 22 tokens, the model")
