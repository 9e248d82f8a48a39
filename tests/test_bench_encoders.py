"""bench.encoders: the four that are timed compute the same, what is wrong is not timed, and the file says what ran."""

import functools
import json
import re

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from bench import encoders, places
from tfm_kernels.bench import timing
from tfm_kernels.bench.model import RUNNERS
from tfm_kernels.testing.float64 import assert_same_in_float64


def tiny(rows, layers=2):
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), {"src": torch.randn(rows, 5, 16)}


@pytest.mark.parametrize("train", [False, True])
def test_all_are_timed_and_written(tmp_path, capsys, monkeypatch, train):
    case = functools.partial(encoders.case, tiny, 3, train, torch.float32)
    monkeypatch.setattr(encoders, "CASES", {"tiny": case})
    monkeypatch.setattr(encoders, "PLAN", timing.Plan(seconds=0.0, least=1, most=1))
    out = tmp_path / "encoders.json"
    assert encoders.main(["--out", str(out)]) == 0
    found = json.loads(out.read_text())["cases"]["tiny"]
    assert list(found) == list(RUNNERS) and found["stock"]["times"] == 1.0
    assert capsys.readouterr().out.count("x") == 3


def test_all_compute_the_same():
    runs, _ = encoders.case(tiny, 3, False, torch.float64)
    inferences = [run.__wrapped__ for run in runs.values()]
    assert [one.compiled is None for one in inferences] == [True, True, False, False]
    with torch.no_grad():
        stock, *others = ((one.compiled or one.model)(**one.call.kwargs) for one in inferences)
    for other in others:
        assert_same_in_float64(stock, other)


def test_what_is_wrong_is_not_timed(monkeypatch):
    real = tfk.prove
    monkeypatch.setattr(tfk, "prove", lambda model, *rest, **options: real(Means(model), *rest, **options))
    with pytest.raises(AssertionError, match="FAILED"):
        encoders.case(padded, 3, False, torch.float32)


def padded(rows, layers=1):
    model, inputs = tiny(rows, layers)
    return model, {**inputs, "src_key_padding_mask": torch.arange(5).expand(rows, 5) >= 3}


class Means(nn.Module):
    """Reads padding, which packed execution leaves out."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **inputs):
        return self.model(**inputs).mean(1)


def test_readme_quotes_the_recorded_results():
    readme = (places.ROOT / "README.md").read_text()
    found = json.loads((places.RESULTS / "cpu-zen4" / "models" / "encoders.json").read_text())
    assert set(found["cases"]) == set(encoders.CASES)
    for name, case in found["cases"].items():
        (line,) = (line for line in readme.splitlines() if line.startswith(f"| {name} |"))
        cells = [f"{case['stock']['median'] * 1e3:.0f} ms", *(f"{case[who]['times']:.2f}x" for who in RUNNERS[1:])]
        assert line == f"| {name} | {' | '.join(cells)} |"


def test_the_models_are_as_named():
    assert {name.partition(",")[0] for name in encoders.MODELS} == {
        "BERT", "MPNet", "ModernBERT", "DeBERTa-v3", "Qwen3", "ViT", "torch.nn",
    }  # fmt: skip
    assert sum("training" in name for name in encoders.CASES) == 6 and len(encoders.CASES) == 22
    pytest.importorskip("transformers")
    for name, (make, rows, _) in encoders.MODELS.items():
        model, inputs = make(rows=2, layers=1)
        mask = inputs.get("attention_mask")
        shortest, longest = re.search(r"rows of (?:(\d+) to )?(\d+)", name).groups()
        assert mask is None or mask.sum(1).tolist() == [int(shortest or longest), int(longest)]
        report = tfk.patch(model.eval())
        assert report.replaced and rows >= 4
