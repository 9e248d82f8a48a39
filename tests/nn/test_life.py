"""What happens to a module in its life: copied, pickled, compiled, exported, checkpointed, moved, cast, emptied."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import tfm_kernels as tfk
from tfm_kernels.testing.float64 import assert_same_in_float64

from .twins import randn, results

B, TS, TT, E, H, FF = 3, 5, 6, 16, 4, 20
SRC, TGT = randn(B, TS, E, dtype=torch.float32), randn(B, TT, E, dtype=torch.float32, seed=1)
PAD = torch.arange(TS) >= torch.tensor([2, 5, 3])[:, None]
CAUSAL = nn.Transformer.generate_square_subsequent_mask(TT)
MASKS = {"tgt_mask": CAUSAL, "src_key_padding_mask": PAD, "memory_key_padding_mask": PAD}
MODELS = {
    "post norm": lambda **o: tfk.nn.Transformer(E, H, 1, 1, FF, 0.0, batch_first=True, **o),
    "pre norm": lambda **o: tfk.nn.Transformer(E, H, 2, 1, FF, 0.0, batch_first=True, norm_first=True, **o),
}
ENCODER, DECODER = 1 + 2 + 1, 2 + 3 + 1  # fused operators of a layer: attentions, norms, the ffn
FUSED = {"post norm": ENCODER + 1 + DECODER + 1, "pre norm": 2 * ENCODER + 1 + DECODER + 1}  # with the final norms


def model(kind="post norm", **options):
    torch.manual_seed(0)
    return MODELS[kind](**{"backend": "cpu", **options})


def fused(graph_module):
    """How many operators of ours a graph calls, also inside its higher-order operators."""
    nodes = [node for g in graph_module.modules() if hasattr(g, "graph") for node in g.graph.nodes]
    return sum("tfm_kernels" in str(node.target) and "fwd" in str(node.target) for node in nodes)


@pytest.mark.parametrize("kind", MODELS)
def test_compiled_without_a_graph_break(kind):
    module, counter = model(kind), CompileCounterWithBackend("aot_eager")
    expected = results(module, [SRC, TGT], **MASKS)
    torch._dynamo.reset()
    compiled = results(torch.compile(module, fullgraph=True, backend=counter), [SRC, TGT], **MASKS)
    for name, tensor in compiled.items():
        torch.testing.assert_close(tensor, expected[name.replace("_orig_mod.", "")], rtol=1e-5, atol=1e-6, msg=name)
    assert [fused(graph) for graph in counter.graphs] == [FUSED[kind]]


@pytest.mark.parametrize("options", [{}, {"dropout": 0.5}, {"add_bias_kv": True}, {"kdim": 10, "vdim": 6}])
def test_attention_with_weights_compiled(options):
    module = tfk.nn.MultiheadAttention(E, H, batch_first=True, backend="cpu", **options)
    memory = [randn(B, 7, width, dtype=torch.float32, seed=width) for width in (module.kdim, module.vdim)]
    torch._dynamo.reset()
    out, weights = torch.compile(module, fullgraph=True, backend="aot_eager")(SRC, *memory, is_causal=True)
    assert out.shape == SRC.shape
    if not module.dropout:
        expected = module(SRC, *memory, is_causal=True)
        torch.testing.assert_close((out, weights), expected, rtol=1e-5, atol=1e-6)


def test_compiled_with_changing_shapes_is_one_graph():
    layer = tfk.nn.TransformerEncoderLayer(E, H, FF, 0.0, batch_first=True, backend="cpu")
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    counts = set()
    for length in (5, 9, 13):
        x = randn(2, length, E, dtype=torch.float32)
        torch.testing.assert_close(compiled(x), layer(x), rtol=1e-5, atol=1e-6)
        counts.add(counter.frame_count)
    assert len(counts) == 1


@pytest.mark.parametrize(("kind", "strict"), [("post norm", False), ("pre norm", False), ("pre norm", True)])
def test_exported(kind, strict):
    module = model(kind).eval()
    program = torch.export.export(module, (SRC, TGT), MASKS, strict=strict)
    torch.testing.assert_close(program.module()(SRC, TGT, **MASKS), module(SRC, TGT, **MASKS))
    assert fused(program.graph_module) == FUSED[kind]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_an_exported_program_trains(norm_first, strict):
    layer = tfk.nn.TransformerEncoderLayer(E, H, FF, 0.0, batch_first=True, norm_first=norm_first, backend="cpu")
    program = torch.export.export(layer, (SRC,), strict=strict).module()
    program(SRC).square().sum().backward()
    given = {name: weight.grad for name, weight in program.named_parameters()}
    layer.zero_grad()
    layer(SRC).square().sum().backward()
    torch.testing.assert_close(given, {name: weight.grad for name, weight in layer.named_parameters()})


def test_export_can_be_saved_and_loaded():
    layer = tfk.nn.TransformerEncoderLayer(E, H, FF, batch_first=True, backend="cpu").eval()
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(layer, (SRC,), dynamic_shapes=({1: length},))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    again = torch.export.load(file).module()
    x = randn(B, 9, E, dtype=torch.float32)
    torch.testing.assert_close(again(x), layer(x))


@pytest.mark.parametrize("strict", [False, True])
def test_export_binds_no_size(strict):
    """Of batch, targets or sources, each a Dim without bounds."""
    batch, targets, sources = map(torch.export.Dim, ("batch", "targets", "sources"))
    layer = tfk.nn.TransformerDecoderLayer(E, H, FF, batch_first=True, backend="cpu").eval()
    sizes = ({0: batch, 1: targets}, {0: batch, 1: sources})
    program = torch.export.export(layer, (TGT, SRC), dynamic_shapes=sizes, strict=strict)
    assert all(bounds.lower <= 2 and bounds.upper > 1 << 62 for bounds in program.range_constraints.values())
    x, memory = randn(B + 2, 9, E, dtype=torch.float32), randn(B + 2, 70, E, dtype=torch.float32)
    torch.testing.assert_close(program.module()(x, memory), layer(x, memory))


@pytest.mark.parametrize("kind", MODELS)
def test_copied_and_pickled(kind):
    module = model(kind).eval()
    expected = module(SRC, TGT, **MASKS)
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(again(SRC, TGT, **MASKS), expected)
        assert again.encoder.layers[0].backend == "cpu"
        again.encoder.layers[0].linear1.weight.data.zero_()  # the copy's own weights count, and only there
        assert not torch.equal(again(SRC, TGT, **MASKS), expected)
    assert torch.equal(module(SRC, TGT, **MASKS), expected)
    assert len({p.data_ptr() for p in module.parameters()}) == len(list(module.parameters()))


def test_state_dict_has_nothing_of_ours():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = nn.Transformer(E, H, 1, 1, FF, batch_first=True)
    assert list(model().state_dict()) == list(theirs.state_dict())
    assert not any("extra" in key or "backend" in key for key in model().state_dict())
    assert [name for name, _ in model().named_modules()] == [name for name, _ in theirs.named_modules()]


def test_torchs_module_becomes_ours_by_its_class_alone():
    """No attribute of ours is needed, so what torch pickled or built can be swapped, and back."""
    theirs = nn.TransformerEncoderLayer(E, H, FF, 0.0, batch_first=True)
    expected = theirs(SRC, src_key_padding_mask=PAD)
    swap = {nn.MultiheadAttention: tfk.nn.MultiheadAttention, nn.LayerNorm: tfk.nn.LayerNorm}
    for child in theirs.modules():
        child.__class__ = {**swap, nn.TransformerEncoderLayer: tfk.nn.TransformerEncoderLayer}.get(
            type(child), type(child)
        )
    torch.testing.assert_close(theirs(SRC, src_key_padding_mask=PAD), expected, rtol=1e-5, atol=1e-5)
    assert type(theirs).__bases__[0] is nn.TransformerEncoderLayer


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_with_dropout(kind, reentrant):
    module = model(kind)
    layer = module.encoder.layers[0].train()
    for child in layer.modules():
        if isinstance(child, nn.Dropout):
            child.p = 0.4
    layer.self_attn.dropout = 0.4

    class Saved(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return checkpoint(self.layer, x, use_reentrant=reentrant)

    torch.manual_seed(4)
    expected = results(layer, [SRC])
    torch.manual_seed(4)
    for name, tensor in results(Saved(), [SRC]).items():
        torch.testing.assert_close(tensor, expected[name.replace("layer.", "")], msg=name)


def test_functional_call_uses_the_given_parameters():
    module = model().eval()
    zeros = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    assert not torch.func.functional_call(module, zeros, (SRC, TGT)).any()
    same = {name: p.detach().clone() for name, p in module.named_parameters()}
    assert torch.equal(torch.func.functional_call(module, same, (SRC, TGT)), module(SRC, TGT))


@pytest.mark.parametrize("kind", MODELS)
def test_meta_device(kind):
    module = model(kind, device="meta", backend=None)
    assert all(p.is_meta for p in module.parameters())
    y = module(SRC.to("meta"), TGT.to("meta"), **{name: mask.to("meta") for name, mask in MASKS.items()})
    assert y.is_meta and y.shape == TGT.shape
    filled = module.to_empty(device="cpu")
    filled.load_state_dict(model(kind).state_dict())
    torch.testing.assert_close(filled(SRC, TGT, **MASKS), model(kind)(SRC, TGT, **MASKS))
    with torch.device("meta"):
        assert all(p.is_meta for p in MODELS[kind]().parameters())


def test_fake_tensors():
    with FakeTensorMode():
        layer = tfk.nn.TransformerDecoderLayer(E, H, FF, batch_first=True, backend="cpu")
        y = layer(torch.empty(B, TT, E), torch.empty(B, TS, E), tgt_mask=torch.zeros(TT, TT))
        y.sum().backward()
    assert y.shape == (B, TT, E) and layer.linear1.weight.grad.shape == (FF, E)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("backend", ["reference", "aten", "cpu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", [torch.float32, "low"])
def test_autocast_is_torchs(kind, backend, dtype, given):
    given = dtype if given == "low" else given
    module = model(kind, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layers = len(module.encoder.layers)
        theirs = nn.Transformer(E, H, layers, 1, FF, 0.0, batch_first=True, norm_first=kind == "pre norm")
    theirs.load_state_dict(module.state_dict())
    with torch.autocast("cpu", dtype=dtype):
        y, expected = (m(SRC.to(given), TGT.to(given), **MASKS) for m in (module, theirs))
    assert y.dtype == expected.dtype
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in module.parameters())
    exact = theirs.double()(SRC.to(given).double(), TGT.to(given).double(), **{**MASKS, "tgt_mask": CAUSAL.double()})
    assert (y - exact).norm() <= 1.5 * (expected - exact).norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_cast_models(dtype):
    module = model().to(dtype)
    y = module(SRC.to(dtype), TGT.to(dtype), **MASKS)
    assert y.dtype == dtype
    expected = model()(SRC, TGT, **MASKS)
    torch.testing.assert_close(y.float(), expected, rtol=0.1, atol=0.1 if dtype != torch.float64 else 1e-5)


def test_inference_mode_and_frozen_weights():
    module = model().eval()
    expected = module(SRC, TGT, **MASKS)
    with torch.inference_mode():
        assert torch.equal(module(SRC, TGT, **MASKS), expected)
    frozen = module.requires_grad_(False)(SRC, TGT, **MASKS)
    assert not frozen.requires_grad and torch.equal(frozen, expected)


@pytest.mark.parametrize("backend", ["reference", "aten", "cpu"])
def test_a_second_derivative_is_right_or_refused(backend):
    layer = tfk.nn.TransformerEncoderLayer(
        E, H, FF, 0.0, "gelu", batch_first=True, dtype=torch.float64, backend=backend
    )
    theirs = nn.TransformerEncoderLayer(E, H, FF, 0.0, "gelu", batch_first=True, dtype=torch.float64)
    theirs.load_state_dict(layer.state_dict())

    def second(module):
        x = SRC.double().requires_grad_()
        (first,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    if backend == "cpu":
        with pytest.raises(RuntimeError, match="differentiable once"):
            second(layer)
    else:
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):  # the only one of torch's that can
            assert_same_in_float64(second(layer), second(theirs))


WRITTEN = {
    "norm of two dimensions": (lambda: tfk.nn.LayerNorm((2, 8)), (torch.ones(3, 2, 8),)),
    "RMSNorm of two dimensions": (lambda: tfk.nn.RMSNorm((2, 8)), (torch.ones(3, 2, 8),)),
    "loss of each row": (
        lambda: tfk.nn.LinearCrossEntropyLoss(8, 5, reduction="none"), (torch.ones(3, 8), torch.tensor([0, 1, 2]))
    ),
    "loss of each token": (
        lambda: tfk.nn.LinearCrossEntropyLoss(8, 5, reduction="none"), (torch.ones(1, 2, 8), torch.zeros(1, 2).long())
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_made_without_a_graph_may_be_written_into_with_one(name):
    make, given = WRITTEN[name]
    with torch.no_grad():
        y = make()(*given)
    y.mul_(torch.nn.Parameter(torch.ones(())))
    assert y.requires_grad
