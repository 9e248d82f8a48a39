"""What happens to a model in its life: compiled, copied, pickled, cast, saved, emptied, run under autocast."""

import copy
import io
import pickle

import pytest
import torch

from tests.models.peers import KINDS, Peer, V, inputs, small, tokens
from tfm_kernels.testing.float64 import assert_same_in_float64


@pytest.mark.parametrize(
    ("kind", "changes"), [("translation", {"norm_first": True}), ("causal", {}), ("classifier", {})]
)
def test_compiled_without_a_graph_break(kind, changes):
    model, ids = small(kind, **changes, dtype=torch.float64), inputs(kind)
    expected = model(*ids)
    expected[tokens(kind, ids)].square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    torch._dynamo.reset()
    found = torch.compile(model, fullgraph=True, backend="aot_eager")(*ids)
    found[tokens(kind, ids)].square().sum().backward()
    select = tokens(kind, ids)
    assert_same_in_float64(found[select], expected[select])
    for name, p in model.named_parameters():
        assert_same_in_float64(p.grad, gradients[name], name)


@pytest.mark.parametrize("kind", KINDS)
def test_copied_pickled_and_saved(kind):
    shared = {} if kind == "classifier" else {"share_embeddings": True}
    model, ids = small(kind, **shared), inputs(kind)
    expected = model(*ids)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = small(kind, **shared)
    for parameter in loaded.parameters():
        parameter.data.zero_()
    loaded.load_state_dict(torch.load(file, weights_only=True), strict=True)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert torch.equal(again(*ids), expected)
        assert again.config == model.config
        if shared:
            assert again.output.weight is again.embedding.tokens.weight
        again.output.weight.data.zero_()  # the copy's own weights count, and only there
        assert not torch.equal(again(*ids), expected)
    assert torch.equal(model(*ids), expected)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("kind", KINDS)
def test_made_on_the_meta_device(kind, positions):
    """Sharing outlives to_empty, which has to make new parameters."""
    shared = {} if kind == "classifier" else {"share_embeddings": True}
    model, ids = small(kind, positions=positions, **shared), inputs(kind)
    with torch.device("meta"):
        empty = small(kind, positions=positions, **shared)
    assert all(p.is_meta for p in empty.parameters())
    filled = empty.to_empty(device="cpu")
    for module in filled.modules():
        if type(module).__name__ == "PositionalEncoding":
            module.reset_parameters()
    filled.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(filled(*ids), model(*ids))
    if shared:
        assert filled.output.weight is filled.embedding.tokens.weight
        assert len(list(filled.parameters())) == len(list(model.parameters()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_autocast_is_as_exact_as_torch_nn(kind, dtype):
    model, ids = small(kind, norm_first=True), inputs(kind)
    peer, select = Peer(model).train(), tokens(kind, ids)  # training: the evaluation path of torch differs
    exact = copy.deepcopy(peer).double()(*ids)[select]
    with torch.autocast("cpu", dtype=dtype):
        found, expected = model(*ids)[select], peer(*ids)[select]
    assert found.dtype == expected.dtype == dtype
    found.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    assert (found - exact).norm() <= 2 * (expected - exact).norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_cast_models_are_as_exact_as_torch_nn(kind, dtype):
    """Against float64 on the same rounded weights."""
    model, ids = small(kind, norm_first=True).to(dtype), inputs(kind)
    peer, select = Peer(model).train(), tokens(kind, ids)
    exact = copy.deepcopy(peer).double()(*ids)[select]
    found, expected = model(*ids)[select], peer(*ids)[select]
    assert found.dtype == expected.dtype == dtype
    assert (found - exact).norm() <= 2 * (expected - exact).norm()
    assert model.double()(*ids).dtype == torch.float64


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_acts_in_training_only(kind):
    model, ids = small(kind, dropout=0.4), inputs(kind)
    assert torch.equal(model(*ids), model(*ids))
    model.train()
    torch.manual_seed(5)
    first, second = model(*ids), model(*ids)
    assert not torch.allclose(first, second)
    torch.manual_seed(5)
    assert torch.equal(model(*ids), first)


def test_learns():
    """A few steps of Adam teach a small causal model to count."""
    model = small("causal", backend=None).train()
    ids = torch.arange(1, 13).repeat(4, 1) + torch.arange(4)[:, None]
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        scores = model(ids[:, :-1])
        loss = torch.nn.functional.cross_entropy(scores.reshape(-1, V), ids[:, 1:].reshape(-1))
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 < 2.0 < losses[0]
    assert torch.equal(model.eval()(ids[:, :-1]).argmax(-1), ids[:, 1:])
