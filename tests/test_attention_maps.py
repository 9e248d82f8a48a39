"""Attention maps: those of torch.nn and of transformers' eager attention; nothing left behind; pictures of them.

What is compared runs in float64, where only a mistake is larger than 1e-9.
"""

import copy
import struct
import sys
from typing import NamedTuple

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from tests.models.peers import V, inputs, small
from tests.patching.models import batch, bert, distilbert, transformers
from tests.patching.test_patch_recipe import MultiHeadAttention, Residual
from tfm_kernels.heat_maps import heat_maps_figure
from tfm_kernels.ops import attention_watch
from tfm_kernels.patching import registry
from tfm_kernels.testing.float64 import assert_same_in_float64

PAD = torch.arange(7) >= torch.tensor([4, 7, 2])[:, None]
FUTURE = torch.ones(6, 6, dtype=torch.bool).triu(1)


def assert_maps(found, expected):
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert_same_in_float64(found[name], tensor, name)


@pytest.mark.parametrize("backend", ["reference", "aten", "cpu", None])
@pytest.mark.parametrize("norm_first", [False, True])
def test_maps_are_those_of_torch_nn(norm_first, backend):
    """Of every attention of an encoder-decoder: torch's module gives them, asked layer by layer."""
    torch.manual_seed(0)
    sizes = {"dropout": 0.3, "batch_first": True, "norm_first": norm_first}
    model = tfk.nn.Transformer(16, 4, 2, 2, 24, **sizes, dtype=torch.float64, backend=backend)
    source, target = torch.randn(3, 7, 16).double(), torch.randn(3, 6, 16).double()
    expected = {}

    def keep(name, module):
        theirs = nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
        theirs.load_state_dict(module.state_dict())

        def hook(module, args, kwargs, output):
            given = {k: v for k, v in kwargs.items() if k in ("key_padding_mask", "attn_mask")}
            expected[name] = theirs(*args, **given, average_attn_weights=False)[1].detach()

        return module.register_forward_hook(hook, with_kwargs=True)

    masks = {"src_key_padding_mask": PAD, "memory_key_padding_mask": PAD, "tgt_mask": FUTURE, "tgt_is_causal": False}
    hooked = copy.deepcopy(model).eval()
    for name, module in hooked.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            keep(name, module)
    hooked(source, target, **masks)
    found = tfk.get_attention_maps(model, {"src": source, "tgt": target, **masks})
    assert_maps(found, expected)
    assert list(found)[0] == "encoder.layers.0.self_attn" and list(found)[-1] == "decoder.layers.1.multihead_attn"
    assert found["decoder.layers.0.multihead_attn"].shape == (3, 4, 6, 7)


@pytest.mark.parametrize("kind", ["translation", "causal", "masked", "classifier"])
def test_our_models(kind):
    model, ids = small(kind, dtype=torch.float64), inputs(kind)
    maps = tfk.get_attention_maps(model, *ids)
    assert len(maps) == {"translation": 6}.get(kind, 2)
    for name, tensor in maps.items():
        source = ids[0] if "multihead" in name or "encoder" in name else ids[-1]
        seen = tensor * (source == 0)[:, None, None, :]
        assert not seen.any()  # padding gets no weight
        assert_same_in_float64(tensor.sum(-1), torch.ones(tensor.shape[:-1]).double())
        if kind == "causal" or ".decoder." in name and "self" in name:
            assert not tensor.triu(1).any()
    assert torch.equal(model(*ids), small(kind, dtype=torch.float64)(*ids))


def test_a_tuple_of_ones_own_is_one_argument():
    class Pair(NamedTuple):
        ids: torch.Tensor
        scale: float

    class Takes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = small("causal")

        def forward(self, pair):
            return self.model(pair.ids) * pair.scale

    (ids,) = inputs("causal")
    maps = tfk.get_attention_maps(Takes().eval(), Pair(ids, 2.0))
    wanted = tfk.get_attention_maps(small("causal"), ids)
    assert [map.shape for map in maps.values()] == [map.shape for map in wanted.values()]


def test_chosen_layers_and_heads():
    model, ids = small("translation"), inputs("translation")
    every = tfk.get_attention_maps(model, *ids)
    cross = tfk.get_attention_maps(model, tuple(ids), layers="*.multihead_attn", heads=[3, 1])  # one tuple of both
    assert list(cross) == [name for name in every if name.endswith("multihead_attn")]
    for name, tensor in cross.items():
        assert torch.equal(tensor, every[name][:, [3, 1]])
    one = tfk.get_attention_maps(model, *ids, layers=["transformer.encoder.layers.1.self_attn"], heads=2)
    assert [t.shape for t in one.values()] == [(3, 1, 7, 7)]
    with pytest.raises(ValueError, match=r"layers must name some of transformer.encoder.layers.0.self_attn, .*'x'"):
        tfk.get_attention_maps(model, *ids, layers="x")
    with pytest.raises(ValueError, match=r"heads must lie in \[0, 4\)"):
        tfk.get_attention_maps(model, *ids, heads=4)
    with pytest.raises(TypeError, match="layers must be a name, a list of names or None, got 3"):
        tfk.get_attention_maps(model, *ids, layers=3)
    with pytest.raises(TypeError, match="model must be a module, got int"):
        tfk.get_attention_maps(3)


@pytest.mark.parametrize("packed", [True, False])
def test_patched_encoders_of_torch_nn(packed):
    layer = nn.TransformerEncoderLayer(16, 4, 24, 0.2, batch_first=True, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x, expected = torch.randn(3, 7, 16).double(), {}
    plain = copy.deepcopy(model).eval()
    y = x
    for i, layer in enumerate(plain.layers):
        expected[f"layers.{i}.self_attn"] = layer.self_attn(y, y, y, key_padding_mask=PAD, average_attn_weights=False)[
            1
        ].detach()
        y = layer.norm1(y + layer._sa_block(y, None, PAD))
        y = layer.norm2(y + layer._ff_block(y))
    tfk.patch(model, packed=packed)
    found = tfk.get_attention_maps(model, {"src": x, "src_key_padding_mask": PAD})
    assert list(found) == list(expected)
    for name, tensor in found.items():
        live = ~PAD[:, None, :, None] if packed else torch.ones(1, dtype=torch.bool)
        assert_same_in_float64(tensor * live, expected[name] * live)
        if packed:
            assert not (tensor * PAD[:, None, :, None]).any()  # packed runs have no padded queries


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("make", [bert, distilbert])
def test_patched_bert_gives_what_eager_attention_gives(make, packed):
    model = make().double()
    ids, keep = batch()
    model.set_attn_implementation("eager")
    expected = model(ids, attention_mask=keep, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    report = tfk.patch(model, packed=packed)
    found = tfk.get_attention_maps(model, {"input_ids": ids, "attention_mask": keep})
    live = keep[:, None, :, None] if packed else torch.ones(1)
    assert len(found) == len(expected) == 2
    for (name, tensor), wanted in zip(found.items(), expected, strict=True):
        assert "layer.0" in name or "layer.1" in name
        assert_same_in_float64(tensor * live, wanted.detach() * live)
    assert report.fallbacks == {}  # the fused layers ran


def test_patched_gpt2_gives_what_eager_attention_gives():
    hf = transformers()
    torch.manual_seed(0)
    config = hf.GPT2Config(vocab_size=V, n_embd=32, n_layer=2, n_head=4, n_positions=20)
    model = hf.GPT2LMHeadModel(config).double().eval()
    ids = torch.randint(0, V, (2, 6))
    model.set_attn_implementation("eager")
    expected = model(ids, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    tfk.patch(model)
    found = tfk.get_attention_maps(model, ids)
    assert list(found) == ["transformer.h.0.attn", "transformer.h.1.attn"]
    for tensor, wanted in zip(found.values(), expected, strict=True):
        assert_same_in_float64(tensor, wanted.detach())


def test_hand_written_classes():
    class Shown(MultiHeadAttention):
        pass

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Residual(Shown(16, 4), 16)

        def forward(self, x, mask):
            return self.block(x, x, x, mask)

    torch.manual_seed(0)
    model, x, mask = Model().double().eval(), torch.randn(2, 5, 16).double(), torch.ones(5, 5).tril()
    attention = model.block.sublayer
    q, k = (layer(x).view(2, 5, 4, 4).transpose(1, 2) for layer in (attention.w_q, attention.w_k))
    expected = (q @ k.transpose(-2, -1) / 2).masked_fill(mask == 0, -1e9).softmax(-1)
    before = registry.registered()
    try:
        tfk.patching.declare_attention(Shown, query="w_q", key="w_k", value="w_v", out="w_o", heads="heads")
        tfk.patch(model)
        found = tfk.get_attention_maps(model, x, mask)
    finally:
        registry._recipes[:] = before
    assert list(found) == ["block.sublayer"]
    assert_same_in_float64(found["block.sublayer"], expected.detach())


@pytest.mark.parametrize("backend", ["reference", "aten"])  # aten's weights, which the layer gives, are composed
def test_a_module_that_attends_twice_has_two_names(backend):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = tfk.nn.MultiheadAttention(8, 2, batch_first=True, backend=backend)

        def forward(self, x):
            return self.layer(self.layer(x, x, x)[0], x, x)[0]

    assert list(tfk.get_attention_maps(Twice(), torch.randn(1, 3, 8))) == ["layer", "layer:2"]


def test_nothing_is_left_behind():
    """No watcher, no hook, no mode, also where the model or the caller's choice fails."""
    model, ids = small("causal", dropout=0.5), inputs("causal")
    model.train()
    model.encoder.layers[1].eval()
    before = {name: (m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()}
    tfk.get_attention_maps(model, *ids)
    for bad in ({"heads": 9}, {"layers": "x"}):
        with pytest.raises(ValueError):
            tfk.get_attention_maps(model, *ids, **bad)
    with pytest.raises(ValueError, match="ids must hold token numbers"):
        tfk.get_attention_maps(model, torch.full((1, 2), 999))
    assert attention_watch._watcher is None
    after = {name: (m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()}
    assert after == before


def test_models_that_do_not_attend_through_us_are_told_what_to_do():
    stock = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with pytest.raises(ValueError, match=r"as after tfk.patch\(model\), and not be compiled; no attention call"):
        tfk.get_attention_maps(stock, torch.randn(1, 3, 8))


def test_watching_costs_a_compiled_model_nothing():
    layer = tfk.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, backend="cpu").eval()
    x = torch.randn(1, 3, 8)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    expected = compiled(x)
    with attention_watch.watching(lambda call, lse: pytest.fail("told")):
        assert torch.equal(compiled(x), expected)


# --- pictures ---------------------------------------------------------------------------------------------------------


def size_of(path):
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


def test_pictures(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (the plot extra)")
    model, ids = small("translation"), inputs("translation")
    cross = tfk.get_attention_maps(model, *ids, layers="*.multihead_attn")
    words, others = [f"w{i}" for i in range(6)], [f"${i}" for i in range(7)]
    told = {"row": 1, "query_labels": words, "key_labels": others}
    tfk.write_heat_maps(tmp_path / "grid.png", cross, **told, dpi=50)
    width, height = 4 * 2.6 + 5 * 0.9, 2 * 3.5 + 0.9
    assert size_of(tmp_path / "grid.png") == (round(width * 50), round(height * 50))
    axes = heat_maps_figure(cross, **told).axes
    assert len(axes) == 8
    titles = [panel.get_title() for panel in axes]
    assert titles[0] == "transformer.decoder.layers.0.multihead_attn, head 0" and titles[-1].endswith("head 3")
    for panel, name, head in zip(axes, [n for n in cross for _ in range(4)], list(range(4)) * 2, strict=True):
        shown = panel.images[0].get_array()
        assert torch.equal(torch.as_tensor(shown.data), cross[name][1, head])
        assert [label.get_text() for label in panel.get_yticklabels()] == words
        assert [label.get_text() for label in panel.get_xticklabels()] == [rf"\${i}" for i in range(7)]
        assert (panel.get_xlabel(), panel.get_ylabel()) == ("key", "query")

    one = tfk.get_attention_maps(model, *ids, layers="transformer.encoder.layers.0.self_attn", heads=2)
    tfk.write_heat_maps(tmp_path / "one.png", one, head_names=[2])
    assert size_of(tmp_path / "one.png") == (round((5.2 + 1.8) * 100), round((5.2 + 1.8) * 100))
    assert heat_maps_figure(one, head_names=[2]).axes[0].get_title().endswith("head 2")


def test_pictures_of_numbers_of_any_kind(tmp_path):
    """Also of maps that a graph was recorded for, and under any name of the file."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (the plot extra)")
    maps = {name: (torch.rand(1, 1, 2, 3) + 1).bfloat16().requires_grad_() for name in "ab"}
    tfk.write_heat_maps(tmp_path / "maps.pdf", maps)
    assert size_of(tmp_path / "maps.pdf") == (round((2.6 + 1.8) * 100), round((7.0 + 0.9) * 100))
    for panel, weights in zip(heat_maps_figure(maps).axes, maps.values(), strict=True):
        assert panel.images[0].get_clim() == (0.0, weights.max().item())
        assert [label.get_text() for label in panel.get_xticklabels()] == ["0", "1", "2"]


def test_bad_pictures(tmp_path):
    maps = {"a": torch.rand(2, 3, 4, 5)}
    for given, error, message in [
        ([], TypeError, "maps must be a dict of"),
        ({"a": torch.rand(2, 3)}, TypeError, "maps must be a dict of"),
        ({}, ValueError, "maps must hold at least one map, got none"),
        (
            {**maps, "b": torch.rand(2, 3, 4, 6)},
            ValueError,
            r"maps must all have one shape, got \(2, 3, 4, 5\) and \(2, 3, 4, 6\) for b",
        ),
        ({"a": torch.rand(2, 3, 0, 5)}, ValueError, "maps must not be empty"),
    ]:
        with pytest.raises(error, match=f"^write_heat_maps: {message}"):
            tfk.write_heat_maps(tmp_path / "x.png", given)
    for told, message in [
        ({"row": 2}, "row must be one of the 2 rows of maps, counted from 0, got 2"),
        ({"row": -1}, "row must be one of the 2 rows of maps, counted from 0, got -1"),
        ({"row": True}, "row must be one of the 2 rows of maps, counted from 0, got True"),
        ({"query_labels": ["a"]}, "query_labels must hold 4 labels"),
        ({"key_labels": "abcd"}, "key_labels must hold 5 labels, one for each position of maps, got 4"),
        ({"head_names": [1]}, "head_names must name the 3 heads of maps, got 1 names"),
    ]:
        with pytest.raises(ValueError, match=f"^write_heat_maps: {message}"):
            tfk.write_heat_maps(tmp_path / "x.png", maps, **told)
    assert not list(tmp_path.iterdir())


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ImportError, match=r"needs matplotlib, which is not installed: pip install 'tfm_kernels\[plot\]'"
    ):
        tfk.write_heat_maps(tmp_path / "x.png", {"a": torch.rand(1, 1, 2, 2)})
