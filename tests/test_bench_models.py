"""bench.models: what is timed computes the same, and the result file says what ran."""

import json

import pytest
import torch

import tfm_kernels as tfk
from bench import models, places
from tfm_kernels.bench import timing
from tfm_kernels.testing.float64 import assert_same_in_float64
from tfm_kernels.training.loss import IGNORED

TINY = {"d_model": 16, "nhead": 2, "dim_feedforward": 16, "norm_first": True, "max_length": 512}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    build = lambda: tfk.models.TransformerClassifier(tfk.models.ClassifierConfig(50, 2, 1, **TINY))
    monkeypatch.setattr(models, "TRAINED", {"classifier": (build, (4, 12, 0))})
    monkeypatch.setattr(models, "DECODED", {"decoding": (TINY, 5, torch.bfloat16, True)})
    monkeypatch.setattr(models, "PLAN", timing.Plan(seconds=0.0, least=1, most=1))
    monkeypatch.setattr(models.TorchModel, "compile", lambda self: None)  # takes seconds, and is PyTorch's own


def test_every_implementation_is_timed_and_written(tmp_path, capsys):
    out = tmp_path / "models.json"
    assert models.main(["--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert set(found["cases"]) == {"classifier", "decoding"} and found["environment"]["torch"] == torch.__version__
    assert set(found["cases"]["classifier"]["times"]) == {"torch", "torch.compile"}
    assert set(found["cases"]["decoding"]["times"]) == {"ours, no cache", "by hand", "by hand, modules"}
    assert all(case["ours"]["median"] > 0 for case in found["cases"].values())
    assert "x torch.compile" in capsys.readouterr().out


@pytest.fixture
def in_float64():
    """Where only a mistake is larger than 1e-9."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("length", [3, 12])
def test_the_torch_model_computes_the_same(length, in_float64):
    torch.manual_seed(0)
    ours = models.TRAINED["classifier"][0]().eval()
    ids = models.tokens(50, 4, length)
    assert (ids == 0).any() and (ids != 0).any(1).all()
    assert_same_in_float64(models.TorchModel(ours).eval()(ids), ours(ids))


LANGUAGE = tfk.models.MaskedLanguageConfig(50, 1, dropout=0.0, **TINY)
SIZES = {"num_encoder_layers": 1, "num_decoder_layers": 1, "dropout": 0.0, **TINY}
KINDS = {
    "classifier": lambda: tfk.models.TransformerClassifier(tfk.models.ClassifierConfig(50, 2, 1, dropout=0.0, **TINY)),
    "masked language": lambda: tfk.models.MaskedLanguageModel(LANGUAGE),
    "causal language": lambda: tfk.models.CausalLanguageModel(tfk.models.CausalLanguageConfig(**vars(LANGUAGE))),
    "translation": lambda: tfk.models.TranslationTransformer(tfk.models.TranslationConfig(50, 40, **SIZES)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_training_steps_have_the_same_losses(kind, monkeypatch, in_float64):
    """Also the second one, which the first one's gradients decide."""
    monkeypatch.setitem(models.TRAINED, kind, (KINDS[kind], (6, 12, 9 if kind == "translation" else 0)))
    steps = models.trained(kind)
    assert set(steps) == {"ours", "torch", "torch.compile"}
    for _ in range(2):
        ours, *others = (step() for step in steps.values())
        for other in others:
            assert_same_in_float64(ours, other)


def test_targets_are_those_of_the_task():
    ids, targets = models.batch(KINDS["causal language"](), 6, 40, 0)
    padding = ids[0] == 0
    assert padding.any() and torch.equal(targets == IGNORED, padding)
    _, targets = models.batch(KINDS["masked language"](), 6, 40, 0)
    assert 0.05 < (targets != IGNORED)[~padding].float().mean() < 0.3 and (targets[padding] == IGNORED).all()


@pytest.mark.parametrize("decoder", [models.KeptByHand, models.InputsKeptByHand])
def test_decoders_write_the_same_tokens(decoder):
    torch.manual_seed(0)
    config = tfk.models.TranslationConfig(30, 30, num_encoder_layers=1, num_decoder_layers=1, **TINY)
    model = tfk.models.TranslationTransformer(config).eval()
    source = models.tokens(30, 5, 9)
    by_hand = decoder(models.TorchModel(model))(source, 7)
    assert torch.equal(tfk.generate(model, source, 7, bos_id=1), by_hand)


def test_readme_quotes_the_recorded_results():
    readme = (places.ROOT / "README.md").read_text()
    found = json.loads((places.RESULTS / "cpu-zen4" / "models" / "models.json").read_text())
    for name, case in found["cases"].items():
        (line,) = (line for line in readme.splitlines() if name in line)
        assert f"{case['ours']['median'] * 1e3:.0f} ms" in line
        assert all(f"{times:.2f}x" in line for times in case["times"].values())
