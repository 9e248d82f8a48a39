"""bench.decoders: a step of training has one loss, whoever takes it."""

import json

import pytest

from bench import decoders, places

TINY = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=8)


@pytest.fixture
def tiny(monkeypatch):
    pytest.importorskip("transformers", reason="transformers is not installed (the demo extra)")
    for name, size in {**TINY, "vocab_size": 1000}.items():
        monkeypatch.setitem(decoders.SIZES, name, size)
    monkeypatch.setattr(decoders, "LAYERS", {"Llama": 2, "Qwen3": 2})


@pytest.mark.parametrize("family, share", [("Qwen3", 0.25), ("Llama", 1.0)])
def test_a_step_of_training_has_one_loss(tiny, family, share):
    runs, _ = decoders.training(family, 3, 16, share)
    assert set(runs) == {
        "Hugging Face", "Hugging Face, bfloat16", "patched", "patched, bfloat16",
        "patched, Objective", "patched, bfloat16, Objective",
    }  # fmt: skip
    losses = {who: float(run().detach()) for who, run in runs.items()}
    stock = losses["Hugging Face"]
    assert 5.0 < stock < 9.0, "of 1000 classes and random weights"
    for who, loss in losses.items():
        assert abs(loss - stock) < (0.05 if "bfloat16" in who else 1e-4), who


def test_readme_quotes_the_recorded_results():
    """Of each column of its table all that were timed, in its order."""
    readme = (places.ROOT / "README.md").read_text()
    found = json.loads((places.RESULTS / "cpu-zen4" / "models" / "decoders.json").read_text())["cases"]
    assert set(found) == set(decoders.CASES)
    table = readme.partition("| 32 tokens after 32")[2].partition("\n\n")[0].splitlines()[2:]
    columns = list(zip(*([cell.strip() for cell in line.split("|")[2:-1]] for line in table), strict=True))
    of = ("generation, 1 row", "generation, 8 rows", "torch.compile", "prompt", "training, 1 x 256", "training, 8 x 64")
    assert len(columns) == len(of)
    order = [
        "Hugging Face, bfloat16", "patched", "patched, bfloat16", "int8_weight_only, patched", "patched, Objective",
        "patched, bfloat16, Objective",
    ]  # fmt: skip
    for words, column in zip(of, columns, strict=True):
        case = next(case for name, case in found.items() if words in name)
        assert [cell for cell in column if cell] == [f"{case[who]['times']:.2f}x" for who in order if who in case]
