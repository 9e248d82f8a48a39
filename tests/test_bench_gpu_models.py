"""The models part of `python -m bench.gpu`, small and on the CPU: what it proves, times and finds wrong."""

import json
import time

import pytest
import torch
from torch import nn

from bench.gpu import models, table
from bench.gpu.part import GREEN, RED, Room, run
from bench.gpu.parts import PARTS
from tfm_kernels import _measured
from tfm_kernels.bench.model import BOTH, COMPILED, RUNNERS

SMALL = models.Size(16, 2, 32, 1, 4, 8)


def items(folder):
    return {item.key: item for item in models.items(Room(folder, {}, time.monotonic() + 600, (), "cpu"), None, SMALL)}


def test_every_model_runs_by_choice_and_by_triton(tmp_path):
    assert {key.partition(" ")[2] for key in items(tmp_path) if key.startswith("auto ")} == set(models.MODELS)
    assert {key.partition(" ")[2] for key in items(tmp_path) if key.startswith("triton ")} == set(models.MODELS)
    part = next(part for part in PARTS if part.name == "models")
    assert part.named and part.processes == 1, "it has a run of its own, and what is timed is alone"


@pytest.mark.parametrize("name", ["encoder, training without dropout", "transformer"])
def test_a_model_is_proven_and_timed_eager_and_compiled(tmp_path, monkeypatch, name):
    monkeypatch.setattr(models, "SECONDS", 0.0)
    monkeypatch.setattr(models, "BACKENDS", ("cpu",))
    record = run(items(tmp_path)[f"cpu {name}"])
    assert record["state"] == GREEN, record
    # torch.compile compiles nothing of nn.Transformer, which looks at its mask's numbers
    timed = [who for who in RUNNERS if name != "transformer" or who != COMPILED]
    assert [runner["name"] for runner in record["runners"]] == timed and "bfloat16" in record["proof"]
    assert any("torch.compile made 1 graph" in note for note in record["notes"]), record["notes"]
    assert (name == "transformer") != ("training" in record["proof"])
    head, line, _ = table._model_lines({"models": {"groups": [record]}})
    assert head.endswith(f"{BOTH} ms") and line.startswith(f"cpu {name} ") and line.count("x)") == len(timed)


def test_what_is_wrong_or_cannot_be_compiled_is_red(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "SECONDS", 0.0)

    def refuse(*args, **kwargs):
        raise RuntimeError("no compiler")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", lambda model, **options: refuse)
        record = run(items(tmp_path)["auto encoder"])
    assert record["state"] == RED and "no compiler" in record["why"] and len(record["runners"]) == 2
    monkeypatch.setitem(models.MODELS, "encoder", (Means.build, 0.0, False))
    record = run(items(tmp_path)["auto encoder"])
    assert record["state"] == RED and "FAILED" in record["why"] and not record["runners"], record


class Means(nn.Module):
    """Of rows, padding included, which packed execution does not compute."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, src, src_key_padding_mask):
        return self.encoder(src, src_key_padding_mask=src_key_padding_mask).mean(1)

    @staticmethod
    def build(size, dropout):
        encoder, inputs = models.encoder(size, dropout)
        return Means(encoder), inputs


def test_what_tune_chooses_is_kept_beside_the_results(tmp_path):
    before = _measured.file()
    record = run(items(tmp_path)["tune encoder"])
    assert record["state"] == GREEN and record["tuned"]["rows"], record
    assert {row["device"] for row in record["tuned"]["rows"]} == {"cpu"}
    kept = json.loads((tmp_path / "tuned.json").read_text())
    assert kept["settings"] and record["tuned"]["file"] == str(tmp_path / "tuned.json")
    assert _measured.file() == before and not _measured.known()
