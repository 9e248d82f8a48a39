"""Bad configurations and bad ids: one clear sentence each."""

import pytest
import torch

import tfm_kernels as tfk
from tests.models.peers import KINDS, inputs, small

CONFIGS = {
    "translation": lambda **c: tfk.models.TranslationConfig(**{"source_vocab": 9, "target_vocab": 9, **c}),
    "classifier": lambda **c: tfk.models.ClassifierConfig(**{"vocab": 9, "num_classes": 2, **c}),
    "masked": lambda **c: tfk.models.MaskedLanguageConfig(**{"vocab": 9, **c}),
    "causal": lambda **c: tfk.models.CausalLanguageConfig(**{"vocab": 9, **c}),
}
SHARED = [
    ({"d_model": 10, "nhead": 4}, ValueError, "d_model must be divisible by nhead, got d_model 10 and nhead 4"),
    ({"d_model": 0}, ValueError, "d_model must be at least 1, got 0"),
    ({"d_model": 8.0}, TypeError, "d_model must be an int, got float"),
    ({"dim_feedforward": 0}, ValueError, "dim_feedforward must be at least 1, got 0"),
    ({"max_length": 0}, ValueError, "max_length must be at least 1, got 0"),
    ({"dropout": 1.5}, ValueError, r"dropout must lie in \[0, 1\], got 1.5"),
    ({"activation": "tanh"}, ValueError, "activation must be one of relu, gelu, gelu_tanh, silu, got 'tanh'"),
    ({"positions": "rotary"}, ValueError, "positions must be one of sinusoidal, learned, got 'rotary'"),
    ({"layer_norm_eps": -1.0}, ValueError, "eps must be a finite number >= 0, got -1.0"),
    ({"norm_first": 1}, TypeError, "norm_first must be True or False, got 1"),
    ({"final_norm": "yes"}, TypeError, "final_norm must be True, False or None, got 'yes'"),
    ({"pad_id": 9}, ValueError, "pad_id must be below .*vocab 9, got 9"),
    ({"pad_id": -1}, ValueError, "pad_id must be at least 0, got -1"),
]
OWN = [
    ("translation", {"source_vocab": 0}, ValueError, "source_vocab must be at least 1, got 0"),
    ("translation", {"num_decoder_layers": 0}, ValueError, "num_decoder_layers must be at least 1, got 0"),
    ("translation", {"target_vocab": 8, "share_embeddings": True}, ValueError, "share_embeddings needs one vocabulary"),
    ("classifier", {"num_classes": 0}, ValueError, "num_classes must be at least 1, got 0"),
    ("classifier", {"pooling": "max"}, ValueError, "pooling must be one of mean, first, got 'max'"),
    ("classifier", {"share_embeddings": True}, ValueError, "share_embeddings must be False"),
    ("masked", {"num_layers": 0}, ValueError, "num_layers must be at least 1, got 0"),
    ("causal", {"vocab": "9"}, TypeError, "vocab must be an int, got str"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_shared_fields(kind):
    name = type(CONFIGS[kind]()).__name__
    for changes, error, message in SHARED:
        with pytest.raises(error, match=f"^{name}: {message}$"):
            CONFIGS[kind](**changes)


@pytest.mark.parametrize(("kind", "changes", "error", "message"), OWN)
def test_own_fields(kind, changes, error, message):
    with pytest.raises(error, match=message):
        CONFIGS[kind](**changes)


@pytest.mark.parametrize("kind", KINDS)
def test_ids(kind):
    model, good = small(kind), inputs(kind)
    name = type(model).__name__
    for bad, error, message in [
        ([[1, 2]], TypeError, "must be a tensor, got list"),
        (torch.ones(3, 4), ValueError, "must be an int32 or int64 tensor of shape"),
        (torch.ones(3, dtype=torch.long), ValueError, "must be an int32 or int64 tensor of shape"),
        (torch.ones(3, 0, dtype=torch.long), ValueError, "must have 1 to 40 positions, max_length, got 0"),
        (torch.ones(3, 41, dtype=torch.long), ValueError, "must have 1 to 40 positions, max_length, got 41"),
        (
            torch.tensor([[1, 99], [1, 1], [2, 2]]),
            ValueError,
            r"must hold token numbers in \[0, \d+\), got values from 1 to 99",
        ),
        (
            torch.tensor([[1, -1], [1, 1], [2, 2]]),
            ValueError,
            r"must hold token numbers in \[0, \d+\), got values from -1 to 2",
        ),
    ]:
        with pytest.raises(error, match=f"^{name}: .*ids {message}"):
            model(*good[:-1], bad)
    if kind == "translation":
        with pytest.raises(ValueError, match=f"^{name}: target_ids must have the batch size 3 of source_ids"):
            model(good[0], good[1][:2])
        with pytest.raises(TypeError, match=f"^{name}: source_ids must be a tensor, got NoneType$"):
            model(None, good[1])


@pytest.mark.parametrize("kind", KINDS)
def test_backend_is_checked(kind):
    with pytest.raises(ValueError, match="backend must be one of"):
        small(kind, backend="gpu")
