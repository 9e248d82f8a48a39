"""Llama's attention and layers, patched: what is taken, and what nobody may tell apart from the original afterwards."""

import copy
import importlib.util
import inspect
import sys

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from tests.patching.models import assert_as_exact, batch, results, transformers
from tests.patching.test_patch_families import DECODER, build

TAKEN = ("llama", "mistral", "qwen2", "qwen3", "gemma")  # attention
LAYERS = ("llama", "mistral", "qwen2", "qwen3")
NORM = "model.layers.0.post_attention_layernorm"


@torch.no_grad()
def logits(model):
    return model(batch()[0], use_cache=False).logits


@pytest.mark.parametrize("kind", TAKEN)
def test_attention_turns_its_positions_by_our_op(kind):
    """A report calls attention replaced, too, where transformers' registry alone leads to us."""
    with tfk.patch(build(kind)) as report:
        notes = [entry.note for entry in report.entries if entry.kind.endswith("Attention")]
        assert len(notes) == 2 and all(note.startswith("rotary positions in one pass") for note in notes), str(report)


def test_another_turn_of_the_features_stays(tmp_path):
    """Their own rotate_half, under an apply_rotary_pos_emb that is Llama's word for word."""
    hf = transformers()
    text = inspect.getsource(sys.modules[hf.LlamaModel.__module__])
    start, end = text.index("def rotate_half"), text.index("\n\n\n", text.index("def rotate_half"))
    turn = "def rotate_half(x):\n    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)"
    (tmp_path / "modeling_turned.py").write_text(text[:start] + turn + text[end:])
    name = "transformers.models.llama.modeling_turned"
    spec = importlib.util.spec_from_file_location(name, tmp_path / "modeling_turned.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        torch.manual_seed(0)
        model = module.LlamaForCausalLM(hf.LlamaConfig(**DECODER)).eval()
        wanted = logits(model)
        with tfk.patch(model) as report:
            torch.testing.assert_close(logits(model), wanted)
        assert any(entry.kind == "LlamaDecoderLayer" and entry.replaced for entry in report.entries)
    finally:
        del sys.modules[name]


def tripled(norm):
    class Tripled(type(norm)):
        def forward(self, hidden_states):
            return 3.0 * super().forward(hidden_states)

    other = Tripled(len(norm.weight))
    other.load_state_dict(norm.state_dict())
    return other


class Adapter(nn.Module):
    """As adapters are written: what is asked of it is the wrapped module's."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base, name)

    def forward(self, x):
        return 2.0 * self.base(x)


OTHERS = {
    "subclass": tripled, "adapter": Adapter, "LayerNorm": lambda norm: nn.LayerNorm(32),
    "Identity": lambda norm: nn.Identity(),
}  # fmt: skip


@pytest.mark.parametrize(
    "kind, other, compiled",
    [
        *((kind, other, False) for kind in LAYERS for other in OTHERS), ("llama", "subclass", True),
        *(pytest.param("llama", other, True, marks=pytest.mark.slow) for other in OTHERS if other != "subclass"),
    ],
)  # fmt: skip
def test_a_norm_that_took_the_place_of_the_known_one_is_called(kind, other, compiled):
    model = build(kind)
    stock, changed = copy.deepcopy(model), OTHERS[other](model.get_submodule(NORM))
    with tfk.patch(model) as report:
        for m in (stock, model):
            m.set_submodule(NORM, copy.deepcopy(changed))
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        torch.testing.assert_close(logits(run), logits(stock))
        if not compiled:
            (reason,) = report.fallbacks["model.layers.0"]
            assert reason.startswith("post_attention_layernorm is ") and "model.layers.1" not in report.fallbacks
    torch._dynamo.reset()


class Tripling(torch.Tensor):
    """As FSDP2's DTensor or a quantised weight: what it means is not what lies in its memory."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        y = super().__torch_function__(function, types, args, kwargs or {})
        return 3.0 * y.as_subclass(torch.Tensor) if function is torch.Tensor.mul else y


@pytest.mark.parametrize("place, noted", [(NORM, "model.layers.0"), ("model.norm", "model.norm")])
def test_weights_of_a_tensor_class_of_their_own_keep_their_meaning(place, noted):
    model = build("llama")
    stock = copy.deepcopy(model)
    with tfk.patch(model) as report:
        for m in (stock, model):
            norm = m.get_submodule(place)
            norm.weight = nn.Parameter(norm.weight.detach().as_subclass(Tripling))
        torch.testing.assert_close(logits(model), logits(stock))
        (reason,) = report.fallbacks[noted]
        assert reason.endswith("no ordinary tensors")


def test_mixtures_of_experts_take_attention_without_a_word():
    hf = transformers()
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**DECODER, **experts, num_key_value_heads=2, head_dim=8)).eval()
    wanted = logits(model)
    with tfk.patch(model) as report:
        torch.testing.assert_close(logits(model), wanted)
        assert report.fallbacks == {}


@pytest.mark.parametrize("kind", ["llama", "gemma", "t5"])
def test_embeddings_of_inference_mode_go_through_norms_with_gradients(kind):
    """PyTorch cannot keep such a tensor for a backward pass, and the norms' own code does not."""

    def run(model):
        with torch.inference_mode():
            x = model.get_input_embeddings()(batch()[0])
        given = {"decoder_inputs_embeds": x} if kind == "t5" else {"use_cache": False}
        return model(inputs_embeds=x, **given).logits

    model = build(kind)
    exact = results(copy.deepcopy(model).double(), run)
    stock = results(model, run)
    with tfk.patch(model):
        assert_as_exact(results(model, run), stock, exact)
