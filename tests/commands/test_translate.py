"""``translate``: a line for each line, BLEU against a reference, and one sentence for what is wrong."""

import sys

import pytest
import torch

import tfm_kernels as tfk
from tests.commands.test_train import refused
from tfm_kernels.training import run_folder
from tfm_kernels.training.vocabulary import END, START

pytest.importorskip("safetensors")


def alone(runs, line, **how):
    """What the model makes of one line, without padding."""
    trained = run_folder.opened(runs / "translate", "translate")
    ids = torch.tensor([[*trained.vocabularies["source"].encode(line), END]], device=trained.device)
    found = tfk.generate(trained.model, ids, 12, bos_id=START, eos_id=END, **how)
    return trained.vocabularies["target"].decode(found[0].tolist()).strip()


@pytest.mark.parametrize("beams", [1, 4])
def test_each_line_is_translated_in_its_place(run, runs, tmp_path, beams):
    lines = ["the cat", "", "a dog and a cat", "a dog"]
    (tmp_path / "text").write_text("\n".join(lines) + "\n")
    code, out, err = run("translate", runs / "translate", tmp_path / "text", "--beams", beams, "--max-tokens", 12)
    assert code == 0 and not err
    assert out.split("\n") == [alone(runs, line, num_beams=beams) if line else "" for line in lines] + [""]


def test_a_new_file_and_bleu(run, runs, tmp_path):
    pytest.importorskip("sacrebleu")
    command = "translate", runs / "translate", runs / "en", "--beams", 1, "--max-tokens", 12, "--out", tmp_path / "out"
    code, out, err = run(*command, "--reference", runs / "de")
    assert code == 0 and not out and err.startswith("sacreBLEU ") and 0.0 <= float(err.split()[1]) <= 100.0
    assert len((tmp_path / "out").read_text().splitlines()) == 6
    refused(run(*command), "out exists; --out must be a new file")
    code, _, err = run(
        "translate", runs / "translate", runs / "en", "--reference", tmp_path / "out", "--max-tokens", 12, "--beams", 1
    )
    assert code == 0 and float(err.split()[1]) in (0.0, pytest.approx(100.0))  # its own words; 0 where all are short


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["classify", "en"], "holds a run of `train classify`; this needs one of `train translate`"),
        (["translate", "absent"], "cannot be read (No such file or directory)"),
        (["translate", "en", "--beams", "0"], "--beams and --max-tokens must be >= 1, got 0 and None"),
        (["translate", "en", "--reference", "tsv.cut"], "has 6 lines but"),
        (["translate", "en", "--out", "absent/out"], "cannot be written (No such file or directory)"),
    ],
)
def test_what_is_wrong_is_one_sentence(run, runs, monkeypatch, arguments, sentence):
    monkeypatch.chdir(runs)
    (runs / "tsv.cut").write_text("one\ntwo\n")
    refused(run("translate", *arguments), sentence)


def test_sacrebleu_missing_is_one_sentence_before_the_work(run, runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    refused(run("translate", runs / "translate", runs / "en", "--reference", runs / "de"), "pip install sacrebleu")
