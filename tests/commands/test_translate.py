"""``translate``: a line for each line, BLEU against a reference, and one sentence for what is wrong."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tfm_kernels as tfk
from tests.commands.test_train import refused
from tfm_kernels.commands import translate
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
        (["translate", "en", "--out", "classify"], "classify exists; --out must be a new file"),
        (["translate", "en", "--beams", "1", "--length-penalty", "2"], "--length-penalty needs --beams of 2 or more"),
        (["translate", "en", "--length-penalty", "nan"], "--length-penalty must be >= -50, got nan"),
        (["translate", "en", "--length-penalty", "1e9"], "--length-penalty must be <= 50, got 1000000000.0"),
        (["translate", "en", "--beams", "100000000000"], "--beams must be <= 1000, got 100000000000"),
    ],
)
def test_what_is_wrong_is_one_sentence(run, runs, monkeypatch, arguments, sentence):
    monkeypatch.chdir(runs)
    (runs / "tsv.cut").write_text("one\ntwo\n")
    refused(run("translate", *arguments), sentence)


def test_the_output_is_opened_before_the_work_and_gone_where_it_fails(run, runs, monkeypatch, tmp_path):
    seen = []

    def translations(*_):
        seen.append((tmp_path / "out").exists())
        raise RuntimeError("the GPU is gone\nand a trace of it")

    monkeypatch.setattr(translate, "_translations", translations)
    command = "translate", runs / "translate", runs / "en", "--out"
    refused(run(*command, tmp_path / "out"), "translate: RuntimeError: the GPU is gone")
    assert seen == [True] and not (tmp_path / "out").exists()
    refused(run(*command, tmp_path / "absent" / "out"), "cannot be written (No such file or directory)")
    assert seen == [True]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full is a device of Linux")
@pytest.mark.parametrize("size", [1, 100_000])
def test_a_full_disk_is_one_sentence_and_the_text_is_printed(run, runs, monkeypatch, tmp_path, size):
    """Whether it shows when the text is written or, for a short one, when the file is closed."""
    text, out = ["a dog" * size, "ä cat"], tmp_path / "out"
    monkeypatch.setattr(translate, "_translations", lambda *_: text)
    making = Path.open

    def full(self, mode="r", **how):
        if self != out:
            return making(self, mode, **how)
        making(self, mode, **how).close()
        return making(Path("/dev/full"), "w", **how)

    monkeypatch.setattr(Path, "open", full)
    code, printed, err = run("translate", runs / "translate", runs / "en", "--out", out)
    assert code == 1 and printed == "".join(f"{line}\n" for line in text)
    said = f"{out} cannot be written (No space left on device); what was to be in it is printed instead"
    assert err == f"python -m tfm_kernels translate: {said}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [(["a" * 31], ""), (["a" * 32], "1 line of more than 31 tokens was cut\n"),
     (["a dog", "a" * 32, "b" * 40], "2 lines of more than 31 tokens were cut\n")],
)  # fmt: skip
def test_lines_that_are_cut_are_told(run, runs, tmp_path, lines, sentence):
    assert "longer than the run's --max-length is cut" in " ".join(run("translate", "--help")[1].split())
    (tmp_path / "text").write_text("\n".join(lines) + "\n")
    code, out, err = run("translate", runs / "translate", tmp_path / "text", "--beams", 1, "--max-tokens", 3)
    assert code == 0 and len(out.splitlines()) == len(lines) and err == sentence


def test_the_librarys_errors_are_one_sentence_but_not_in_development(run, runs, monkeypatch):
    def translations(*_):
        raise ValueError("generate: ids must be numbers, got letters")

    monkeypatch.setattr(translate, "_translations", translations)
    command = "translate", runs / "translate", runs / "en"
    refused(run(*command), "python -m tfm_kernels translate: generate: ids must be numbers, got letters\n")
    monkeypatch.setattr(sys, "flags", SimpleNamespace(dev_mode=True))
    with pytest.raises(ValueError, match="got letters"):
        run(*command)


def test_sacrebleu_missing_is_one_sentence_before_the_work(run, runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    refused(run("translate", runs / "translate", runs / "en", "--reference", runs / "de"), "pip install sacrebleu")
