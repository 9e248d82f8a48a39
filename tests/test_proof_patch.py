"""prove() with the real patch(): torch.nn's stacks and a Hugging Face encoder, evaluation and training, padded."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfm_kernels as tfk
from tfm_kernels import _library
from tfm_kernels.patching import frozen, onednn, registry, swap
from tfm_kernels.proof import prove_patched


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
    assert after.options == before.options == [{"packed": True, "freeze": False, "backend": None}]


class MeanPool(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = encoder(), nn.Linear(32, 3)

    def forward(self, src, src_key_padding_mask):
        return self.head(self.encoder(src, src_key_padding_mask=src_key_padding_mask).mean(1))


def test_a_patched_model_is_proven_as_it_was_patched():
    """Packed, its padding is 0, which this mean reads."""
    model, inputs = MeanPool().eval(), padded()
    assert not tfk.prove(model, inputs).passed
    tfk.patch(model, packed=False, backend="reference")
    told = [swap.options(module) for module in model.modules()]
    report = tfk.prove(model, inputs)
    assert report.passed, report.table()
    assert [swap.options(module) for module in model.modules()] == told
    assert report.options == [{"packed": False, "freeze": False, "backend": "reference"}]
    assert json.loads(report.to_json())["options"] == report.options
    assert "patch(packed=False, freeze=False, backend='reference')" in report.table()


def test_a_model_of_which_a_part_is_patched_is_proven_so():
    model = MeanPool().eval()
    tfk.patch(model.encoder.layers[0], backend="cpu")
    tfk.patch(model.encoder.layers[1], backend="reference")
    report = tfk.prove(model, padded())
    assert report.passed and "encoder" not in report.replaced and {"encoder.layers.0"} <= set(report.replaced)
    assert [each["backend"] for each in report.options] == ["cpu", "reference"]


@pytest.mark.skipif(not onednn.AVAILABLE, reason="this build of PyTorch has no oneDNN product")
def test_a_frozen_model_is_proven_without_a_graph(monkeypatch):
    monkeypatch.setattr(_library, "nearest", _library.XEON)
    monkeypatch.setattr(frozen, "_PRODUCTS", 0)
    model, inputs = encoder().eval(), padded()
    tfk.patch(model, freeze=True)
    report = tfk.prove(model, inputs, steps=1)
    assert report.passed, report.table()
    assert report.options[0]["freeze"] and any("2 of 2 frozen modules" in note for note in report.notes)
    assert sum(map(frozen.is_frozen, model.modules())) == 2
    product = onednn.product
    monkeypatch.setattr(onednn, "product", lambda *args: product(*args) * 1.001)
    report = tfk.prove(model, inputs)
    assert {row.tensor for row in report.failures} == {"output, no_grad"}
    with pytest.raises(RuntimeError, match="a model patched with freeze=True is for inference alone"):
        tfk.prove(model.train(), inputs)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_mixture_of_experts_as_transformers_makes_it(dtype):
    """Its grouped product knows no float64, in which only the copy that is the truth runs."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).eval()
    before = config._experts_implementation
    report = tfk.prove(model, {"input_ids": torch.randint(99, (2, 11))}, dtype=dtype)
    assert report.passed, report.table()
    assert model.config is config and config._experts_implementation == before != "eager"


def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    mask = (torch.arange(48) < torch.tensor([48, 5, 30, 12, 48, 48, 48, 44] * 2).unsqueeze(1)).long()
    return transformers.LlamaForCausalLM(config), {"input_ids": torch.randint(100, (16, 48)), "attention_mask": mask}


@pytest.mark.parametrize(
    ("dtype", "train"), [(torch.float64, False), (torch.float32, False), (torch.float32, True), (torch.bfloat16, False)]
)
def test_a_llama_whose_norms_ask_for_float32_by_name(dtype, train):
    """A truth that was rounded there would equal the original in float32 and leave nothing to measure by."""
    model, inputs = llama()
    model.train(train)
    if train:
        model.activation_checkpointing_enable()
    report = tfk.prove(model, inputs, dtype=dtype)
    assert report.passed, report.table()
    norms = [row for row in report.rows if row.kind == "module" and row.module.endswith("norm")]
    assert "model.layers.0.self_attn" in report.replaced and "model.rotary_emb" not in report.replaced
    assert dtype == torch.float64 or norms and all(row.stock > 0.0 for row in norms)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1 + 2.0**-20), (torch.bfloat16, 1.001)], ids=str)
def test_a_planted_defect_in_an_rms_norm_fails(dtype, factor):
    model, inputs = llama()

    class TooLarge(type(model.model.norm)):
        def forward(self, x):
            x = x.float()
            y = self.weight.float() * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
            return (y * factor).to(self.weight.dtype)

    def patch(model):
        tfk.patch(model)
        norm = model.model.layers[1].input_layernorm
        tfk.unpatch(norm)
        norm.__class__ = TooLarge

    report = prove_patched(model.eval(), inputs, dtype=dtype, patch=patch)
    assert not report.passed
    assert report.culprits == ["model.layers.1.input_layernorm"], report.table()


class Biased(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4, 9, 9))

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias.unsqueeze(0))


class FusedBiased(Biased):
    error = 1.0

    def forward(self, q, k, v):
        return tfk.ops.attention(q, k, v, bias=self.bias.unsqueeze(0) * self.error, backend="cpu")


class WrongBiased(FusedBiased):
    error = 1.02


def test_attention_in_bfloat16_whose_bias_learns():
    """PyTorch computes it in float32; what bfloat16 costs is the measure, as where nothing learns."""
    torch.manual_seed(0)
    inputs = tuple(torch.randn(8, 4, 9, 128) for _ in range(3))
    for cls in (FusedBiased, WrongBiased):
        report = prove_patched(
            Biased(), inputs, dtype=torch.bfloat16, patch=lambda model, cls=cls: setattr(model, "__class__", cls)
        )
        assert report.culprits == ([] if cls is FusedBiased else ["the model"]), report.table()
    assert not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()


@pytest.mark.parametrize("train", [False, True])
def test_a_t5_in_bfloat16(train):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=100, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu"
    )
    model = transformers.T5ForConditionalGeneration(config).train(train)
    mask = (torch.arange(16) < torch.tensor([16, 5, 9, 12, 16, 16, 3, 16]).unsqueeze(1)).long()
    inputs = {
        "input_ids": torch.randint(100, (8, 16)),
        "attention_mask": mask,
        "decoder_input_ids": torch.randint(100, (8, 9)),
    }
    report = tfk.prove(model, inputs, dtype=torch.bfloat16)
    assert report.passed, report.table()
    assert "decoder.block.1.layer.0.SelfAttention" in report.replaced


class Gated(nn.Module):
    """What it gives, and the weights that nobody asked for."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 16)

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        return x * weights, weights


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.gated = Gated()

    def forward(self, x):
        return self.gated(x)[0]


@pytest.mark.parametrize(
    ("unasked", "factor", "failing"),
    [(("output.1",), 1.0, set()), (("output.1",), 1.001, {"output.0"}), ((), 1.0, {"output.1"})],
    ids=["unasked", "and wrong", "asked"],
)
def test_an_output_that_is_given_only_where_it_is_asked_for(unasked, factor, failing, monkeypatch):
    def fuse(original):
        class Fused(original):
            def forward(self, x):
                return factor * super().forward(x)[0], None

        return Fused

    monkeypatch.setattr(registry, "_recipes", list(registry.registered()))
    recognise = lambda module: type(module) is Gated
    registry.register_recipe(registry.Recipe("gated", recognise, fuse, "gated", unasked=unasked))
    torch.manual_seed(0)
    report = tfk.prove(First(), torch.randn(4, 16))
    alone = {row.tensor for row in report.failures if row.kind == "module"}
    assert {name for name in alone if name.startswith("output")} == failing
    assert report.passed == (not failing)
