"""patch() on GPT-2, BART, Marian, Whisper, T5, ViT, CLIP and Llama, small and with random weights."""

import copy
import pickle

import pytest
import torch

import tfm_kernels as tfk
from tests.patching.models import (
    assert_dropout_proven,
    assert_same_results,
    batch,
    compare,
    results,
    transformers,
)

WIDTH = 32
DECODER = dict(vocab_size=99, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
BART = dict(
    vocab_size=99, d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    decoder_start_token_id=2, forced_eos_token_id=None,
)  # fmt: skip
T5 = dict(vocab_size=99, d_model=WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
IMAGE = dict(
    hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4
)
LLAMAS = ("llama", "mistral", "qwen2", "qwen3", "gemma", "olmo2")
GPT2 = dict(vocab_size=99, n_positions=64, n_embd=WIDTH, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
FLOAT64 = "in float64 its own code takes the variance in float32"
MODELS = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "llama": ("LlamaForCausalLM", {**DECODER, "num_key_value_heads": 2, "mlp_bias": True}),
    "mistral": ("MistralForCausalLM", {**DECODER, "num_key_value_heads": 2, "sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", {**DECODER, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3ForCausalLM", {**DECODER, "num_key_value_heads": 2, "head_dim": 16}),
    "gemma": ("GemmaForCausalLM", {**DECODER, "num_key_value_heads": 1, "head_dim": 8}),
    "olmo2": ("Olmo2ForCausalLM", {**DECODER, "num_key_value_heads": 2}),
    "bart": ("BartForConditionalGeneration", BART),
    "marian": ("MarianMTModel", BART),
    "t5": ("T5ForConditionalGeneration", T5),
    "gated_t5": ("T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu"}),
    "vit": ("ViTModel", IMAGE),
    "clip": ("CLIPVisionModel", {**IMAGE, "hidden_act": "gelu"}),
}
EXPECTED = {  # what must have been fused: class name -> how many
    "gpt2": {"GPT2Block": 2, "GPT2MLP": 2, "LayerNorm": 5},
    "llama": {"LlamaDecoderLayer": 2, "LlamaMLP": 2, "LlamaRMSNorm": 5},
    "mistral": {"MistralDecoderLayer": 2, "MistralMLP": 2, "MistralRMSNorm": 5},
    "qwen2": {"Qwen2DecoderLayer": 2, "Qwen2MLP": 2, "Qwen2RMSNorm": 5},
    "qwen3": {"Qwen3DecoderLayer": 2, "Qwen3MLP": 2, "Qwen3RMSNorm": 9},
    "gemma": {"GemmaDecoderLayer": 2, "GemmaMLP": 2, "GemmaRMSNorm": 5},
    "olmo2": {"Olmo2MLP": 2, "Olmo2RMSNorm": 9},
    "bart": {"BartEncoderLayer": 2, "BartDecoderLayer": 2},
    "marian": {"MarianEncoderLayer": 2, "MarianDecoderLayer": 2},
    "t5": {"T5DenseActDense": 4, "T5LayerNorm": 12},
    "gated_t5": {"T5DenseGatedActDense": 4, "T5LayerNorm": 12},
    "vit": {"ViTLayer": 2, "ViTMLP": 2},
    "clip": {"CLIPEncoderLayer": 2, "CLIPMLP": 2},
}


def build(kind):
    hf = transformers()
    name, settings = MODELS[kind]
    cls = getattr(hf, name)
    torch.manual_seed(0)
    return cls(cls.config_class(**settings)).eval()


def run_of(kind):
    ids, mask = batch()
    if kind in ("vit", "clip"):
        torch.manual_seed(1)
        pixels = torch.randn(2, 3, 16, 16, dtype=torch.float64)
        return lambda m: m(pixels.to(next(m.parameters()))).last_hidden_state
    if kind in ("gpt2", *LLAMAS):
        return lambda m: m(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    return lambda m: m(ids, attention_mask=mask, decoder_input_ids=ids[:, :5], use_cache=False).logits


@pytest.mark.parametrize("kind", MODELS)
def test_same_numbers(kind):
    model = build(kind)
    with tfk.patch(model) as report:
        for name, count in EXPECTED[kind].items():
            fused = [entry for entry in report.replaced if entry.kind == name]
            assert len(fused) >= count, f"{name}: {len(fused)}\n{report}"
        attentions = [e for e in report.entries if e.kind.endswith("Attention") and not e.kind.startswith("T5Layer")]
        assert attentions and all(entry.replaced for entry in attentions), str(report)
    rms = kind.endswith(("t5", "llama")) or kind in LLAMAS
    assert_same_results(model, run_of(kind), double_fallbacks=FLOAT64 if rms else None)


@pytest.mark.parametrize("kind", ["gpt2", *LLAMAS, "bart", "t5"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"cache_implementation": "static"}], ids=str)
def test_generation(kind, options):
    model = build(kind)
    ids, mask = batch()
    if kind in ("gpt2", *LLAMAS):
        ids, mask = ids[1:2], mask[1:2]
    told = dict(attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0, **options)
    wanted = model.generate(ids, **told)
    with tfk.patch(model):
        assert torch.equal(model.generate(ids, **told), wanted)


@pytest.mark.parametrize("kind", ["gpt2", "bart", "t5", "vit"])
def test_dropout_in_training(kind):
    """Draws differ from the original's, so only their sameness from run to run can be asked for, and their presence."""
    model, run = build(kind).train(), run_of(kind)

    def seeded(m):
        torch.manual_seed(3)
        return run(m)

    if kind == "vit":
        model.config.hidden_dropout_prob = 0.3
        for layer in model.layers if hasattr(model, "layers") else model.encoder.layer:
            layer.dropout.p = 0.3
    with tfk.patch(model) as report:
        first, second = results(model, seeded), results(model, seeded)
        model.eval()
        plain = run(model)
        assert report.fallbacks == {}
    compare(first, second, 0.0)
    assert not torch.allclose(first["output"], plain.double(), atol=1e-3)


@pytest.mark.parametrize("name", ["dropout", "attention_dropout", "activation_dropout"])
@pytest.mark.parametrize("kind", ["Bart", "MBart"])
def test_each_dropout_of_bart(kind, name):
    cls, none = (
        getattr(transformers(), f"{kind}ForConditionalGeneration"),
        dict.fromkeys(("dropout", "attention_dropout"), 0.0),
    )
    torch.manual_seed(0)
    assert_dropout_proven(cls(cls.config_class(**{**BART, **none, "activation_dropout": 0.0, name: 0.3})))


@pytest.mark.parametrize("kind", ["Bart", "MBart"])
@torch.no_grad()
def test_what_overflows_in_float16_is_clamped(kind):
    cls = getattr(transformers(), f"{kind}Model")
    torch.manual_seed(0)
    model, ids = cls(cls.config_class(**{**BART, "encoder_layers": 1})).eval().half(), batch()[0]
    layer = model.encoder.layers[0]
    large = (layer.final_layer_norm.weight,) if kind == "Bart" else (layer.fc2.bias, layer.self_attn.out_proj.bias)
    for parameter in large:
        torch.nn.init.constant_(parameter, 60000.0)
    assert model.encoder(ids).last_hidden_state.isfinite().all()
    with tfk.patch(model):
        assert model.encoder(ids).last_hidden_state.isfinite().all()


def test_relative_position_bias_learns():
    model, run = build("t5"), run_of("t5")
    wanted = results(model, run)
    with tfk.patch(model):
        given = results(model, run)
    for side in ("encoder", "decoder"):
        name = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        assert wanted[name].abs().max() > 1e-3
        torch.testing.assert_close(given[name].float(), wanted[name].float())


def test_half_precision_t5_keeps_its_wide_matrix():
    hf = transformers()
    model = build("t5").to(torch.bfloat16)
    for module in model.modules():
        if isinstance(module, hf.models.t5.modeling_t5.T5DenseActDense):
            module.wo.float()
    with tfk.patch(model) as report, torch.no_grad():
        run_of("t5")(model)
        assert "its weights have several dtypes" in str(report)


@pytest.mark.parametrize("backend", ["reference", "aten"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bart", "t5"])
def test_attention_weights(kind, backend):
    model = build(kind)
    ids, mask = batch(lengths=(7, 7, 7))
    more = {} if kind in ("gpt2", *LLAMAS) else {"decoder_input_ids": ids[:, :5]}
    model.set_attn_implementation("eager")
    wanted = model(ids, output_attentions=True, **more)
    with tfk.patch(model, backend=backend):
        given = model(ids, output_attentions=True, **more)
    names = ["attentions"] if not more else ["encoder_attentions", "decoder_attentions", "cross_attentions"]
    for name in names:
        assert len(given[name]) == 2
        for a, b in zip(given[name], wanted[name], strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bart", "t5"])
def test_weights_that_eager_attention_gives_unasked_are_not_held_against_it(kind):
    model, (ids, _) = build(kind), batch(lengths=(7, 7, 7))
    model.set_attn_implementation("eager")
    more = {} if kind in ("gpt2", *LLAMAS) else {"decoder_input_ids": ids[:, :5]}
    report = tfk.prove(model, {"input_ids": ids, **more})
    assert report.passed, report.table()
    attention = [
        row for row in report.rows if "att" in row.module.lower().rpartition(".")[2] and row.tensor == "output.0"
    ]
    assert attention, "attention was held to its own alone"


@pytest.mark.parametrize("backend", ["reference", "aten"])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5"])
def test_autocast(kind, backend, weights):
    """Rotary positions leave queries and keys in float32 beside values in bfloat16: autocast casts for attention."""
    model, (ids, mask) = build(kind), batch()
    more = {} if kind != "t5" else {"decoder_input_ids": ids[:, :5]}
    run = lambda m: m(ids, attention_mask=mask, use_cache=False, output_attentions=weights, **more)
    live = mask.bool() if kind != "t5" else torch.ones(3, 5, dtype=torch.bool)
    exact = run(model.double()).logits.detach()[live]
    model.float()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        stock = run(model).logits[live]
        with tfk.patch(model, backend=backend, packed=not weights) as report:
            given = run(model)
            assert report.fallbacks == {}
    maps = given.get("attentions", given.get("decoder_attentions"))
    assert not weights or maps[0].dtype == torch.bfloat16
    assert given.logits.dtype == stock.dtype
    assert (given.logits[live] - exact).norm() <= 1.5 * (stock - exact).norm()


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_compiled(kind):
    model, run = build(kind), run_of(kind)
    stock = run(model)
    with tfk.patch(model):
        torch.testing.assert_close(run(torch.compile(model, fullgraph=True, backend="aot_eager")), stock)
    torch._dynamo.reset()


def test_other_implementations_are_left_alone():
    model = build("gpt2")
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    report = tfk.patch(model)
    assert report.entries[0].note == "because config.output_attentions is set"
    assert model.config._attn_implementation == "eager"
    tfk.unpatch(model)


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_copy_of_a_model_of_which_a_part_is_patched(again, implementation):
    """Its config says ours, and only the part knows what it said before."""
    model, run = build("bart"), run_of("bart")
    model.set_attn_implementation(implementation)
    stock = run(model)
    tfk.patch(model.model.encoder)
    copied = again(model)
    tfk.patch(copied)
    tfk.unpatch(copied)
    assert copied.config._attn_implementation == implementation
    assert torch.equal(run(copied), stock)


@pytest.mark.parametrize("patched_too", [False, True])
def test_a_model_made_from_a_copy_of_a_patched_ones_config(patched_too):
    """As AutoModel.from_config makes a student of its teacher; the teacher stays patched."""
    teacher, run = build("bart"), run_of("bart")
    stock = run(teacher)
    tfk.patch(teacher)
    student = type(teacher)(copy.deepcopy(teacher.config)).eval()
    student.load_state_dict(teacher.state_dict())
    if patched_too:
        tfk.patch(student)
    torch.testing.assert_close(run(student), stock)
    assert tfk.unpatch(student) and not tfk.unpatch(student)
    assert student.config._attn_implementation == "sdpa" and torch.equal(run(student), stock)
    assert teacher.config._attn_implementation.startswith("tfm_kernels")


def test_a_model_that_shares_a_patched_ones_config_goes_with_it():
    teacher, run = build("bart"), run_of("bart")
    stock = run(teacher)
    tfk.patch(teacher)
    student = type(teacher)(teacher.config).eval()
    student.load_state_dict(teacher.state_dict())
    assert not tfk.unpatch(student)
    assert teacher.config._attn_implementation.startswith("tfm_kernels")
    tfk.unpatch(teacher)
    assert torch.equal(run(student), stock) and torch.equal(run(teacher), stock)
