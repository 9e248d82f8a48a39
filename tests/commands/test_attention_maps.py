"""``attention-maps``: pictures and exact numbers of a trained model, and one sentence for what is wrong."""

import json

import pytest
import torch

import tfm_kernels as tfk
from tests.commands.conftest import largest_file
from tests.commands.test_train import refused
from tfm_kernels.training import run_folder
from tfm_kernels.training.checkpoint import load_tensors
from tfm_kernels.training.vocabulary import END, START

pytest.importorskip("safetensors")
pytest.importorskip("matplotlib")


def test_a_translation_has_three_pictures_and_the_models_numbers(run, runs, tmp_path):
    out = tmp_path / "maps"
    code, printed, err = run("attention-maps", runs / "translate", "a cat", "--target", "eine katze", "--out", out)
    assert code == 0 and not err and "source.png" in printed
    assert sorted(path.name for path in out.glob("*.png")) == ["source.png", "target.png", "target_source.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in out.glob("*.png"))
    trained = run_folder.opened(runs / "translate")
    ids = (
        [[*trained.vocabularies["source"].encode("a cat"), END]],
        [[START, *trained.vocabularies["target"].encode("eine katze")]],
    )
    expected = tfk.get_attention_maps(trained.model, *(torch.tensor(one, device=trained.device) for one in ids))
    found = load_tensors(out / "maps.safetensors")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name].cpu()) for name in found)
    labels = json.loads((out / "labels.json").read_text())
    cross = next(name for name in found if "multihead_attn" in name)
    assert labels[cross]["keys"] == ["a", "\u00b7", "c", "a", "t", "<end>"] and labels[cross]["queries"][0] == "<start>"
    refused(run("attention-maps", runs / "translate", "a cat", "--out", out), "is there already")


@pytest.mark.parametrize("task", ["translate", "classify", "masked-lm", "causal-lm"])
def test_every_task_and_a_choice_of_heads(run, runs, tmp_path, task):
    code, _, err = run(
        "attention-maps", runs / task, "a cat", "--heads", 1, "--layers", "*encoder*", "--out", tmp_path / "maps"
    )
    assert code == 0 and not err
    (weights,) = load_tensors(tmp_path / "maps" / "maps.safetensors").values()
    tokens = len("a cat") + {"translate": 1, "causal-lm": 1}.get(task, 2)
    assert weights.shape == (1, 1, tokens, tokens) and torch.allclose(weights.sum(-1), torch.ones(1, 1, tokens))


@pytest.mark.parametrize(("task", "room"), [("masked-lm", 30), ("translate", 31)])
def test_a_text_that_is_cut_is_told(run, runs, tmp_path, task, room):
    code, _, err = run("attention-maps", runs / task, "a cat " * 9, "--heads", 0, "--out", tmp_path / "maps")
    assert code == 0 and err == f"1 line of more than {room} tokens was cut\n"


@pytest.mark.parametrize("size", [100, 4096])
def test_a_full_disk_is_one_sentence_and_leaves_nothing(run, runs, tmp_path, size):
    with largest_file(size):  # too small for the numbers, and for a picture
        refused(
            run("attention-maps", runs / "masked-lm", "a cat", "--out", tmp_path / "maps"), "maps cannot be written"
        )
    assert not list(tmp_path.iterdir())
    assert run("attention-maps", runs / "masked-lm", "a cat", "--out", tmp_path / "maps")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["classify", "a cat", "--layers", "attic"], "layers must name some of"),
        (["classify", "a cat", "--heads", "7"], "heads must lie in [0, 2), got"),
        (["classify", "a cat", "--target", "eine"], "--target needs a run of `train translate`"),
        (["classify", " "], "the text must hold something"),
        (["classify", "\udcff"], "the text must be UTF-8 text, got byte 0xff in "),
        (["translate", "a cat", "--target", "ein \udcff"], "--target must be UTF-8 text, got byte 0xff in "),
        (["absent", "a cat"], "is not the folder of a run"),
    ],
)
def test_what_is_wrong_is_one_sentence(run, runs, tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(runs)
    refused(run("attention-maps", *arguments, "--out", tmp_path / "maps"), sentence)
    assert not (tmp_path / "maps").exists()
