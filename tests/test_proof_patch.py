"""prove() with the real patch(): torch.nn's stacks and a Hugging Face encoder, evaluation and training, padded."""

import pytest
import torch
from torch import nn

import tfm_kernels as tfk


def encoder(**kwargs):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True, **kwargs)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.2)
    return model


def padded():
    lengths = torch.tensor([20, 7, 13, 1, 20, 16])
    padding = torch.arange(20) >= lengths.unsqueeze(1)
    return {"src": torch.randn(6, 20, 32), "src_key_padding_mask": padding}


@pytest.mark.parametrize(
    ("dtype", "train", "kwargs"),
    [
        (torch.float32, False, {}),
        (torch.float32, True, {"norm_first": True, "activation": "gelu"}),
        (torch.bfloat16, True, {}),
        (torch.bfloat16, False, {"norm_first": True, "activation": "gelu"}),
    ],
    ids=str,
)
def test_an_encoder_with_padding(dtype, train, kwargs):
    """In training the same elements are dropped: were they not, every row would be off by the size of the output."""
    report = tfk.prove(encoder(**kwargs).train(train), padded(), dtype=dtype, steps=1)
    assert report.passed, report.table()
    assert {"layers.0", "layers.1"} <= set(report.replaced)
    assert any("43 of 120 positions are padding" in note for note in report.notes)
    assert not any("original code" in note for note in report.notes)


def test_a_patched_model_is_proven_as_its_original_and_stays_patched():
    model, inputs = encoder().eval(), padded()
    before = tfk.prove(model, inputs)
    tfk.patch(model)
    classes = [type(module) for module in model.modules()]
    after = tfk.prove(model, inputs)
    assert [type(module) for module in model.modules()] == classes
    assert after.replaced == before.replaced and after.rows == before.rows


def test_a_transformer_with_causal_and_padding_masks():
    torch.manual_seed(0)
    model = nn.Transformer(32, 4, 1, 1, 64, 0.1, batch_first=True).train()
    given = padded()
    inputs = {
        **given,
        "tgt": torch.randn(6, 9, 32),
        "tgt_mask": model.generate_square_subsequent_mask(9),
        "tgt_is_causal": True,
        "memory_key_padding_mask": given["src_key_padding_mask"],
    }
    report = tfk.prove(model, inputs)
    assert report.passed, report.table()
    assert "encoder.layers.0" in report.replaced and "decoder.layers.0" in report.replaced


@pytest.mark.parametrize("train", [False, True])
def test_a_bert_encoder_packed(train):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    model = transformers.BertModel(config).train(train)
    mask = (torch.arange(16) < torch.tensor([16, 5, 9, 12]).unsqueeze(1)).long()
    report = tfk.prove(model, {"input_ids": torch.randint(100, (4, 16)), "attention_mask": mask})
    assert report.passed, report.table()
    assert "encoder" in report.replaced and "encoder.layer.0" in report.replaced
    assert any("output.last_hidden_state: 22 of 64 positions are padding" in note for note in report.notes)
