"""patch() on torch.nn's own modules: same numbers, same parameters."""

import copy

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from tests.patching.models import assert_same_results, compare, encoder, results


def masked_input(batch_first=True):
    torch.manual_seed(2)
    x = torch.randn(3, 7, 16, dtype=torch.float64)
    hidden = torch.arange(7) >= torch.tensor([4, 7, 2])[:, None]
    return (x if batch_first else x.transpose(0, 1)), hidden


def dtype_of(model):
    return next(model.parameters()).dtype


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_encoder(norm_first, batch_first, packed):
    model = encoder(batch_first, norm_first)
    x, hidden = masked_input(batch_first)
    live = ~hidden if batch_first else ~hidden.T
    run = lambda m: m(x.to(dtype_of(m)), src_key_padding_mask=hidden)
    assert_same_results(model.train(), run, live, packed=packed)
    with tfk.patch(model, packed=packed):
        padding = run(model)[~live]
    assert bool((padding == 0).all()) is packed


@pytest.mark.parametrize("packed", [False, True])
def test_causal_encoder(packed):
    x, hidden = masked_input()
    future = torch.ones(7, 7, dtype=torch.bool).triu(1)
    run = lambda m: m(x.to(dtype_of(m)), mask=future, src_key_padding_mask=hidden)
    assert_same_results(encoder().train(), run, ~hidden, packed=packed)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_packed_dropout_is_the_padded_one(norm_first, batch_first):
    model = encoder(batch_first, norm_first, dropout=0.3).train()
    x, hidden = masked_input(batch_first)
    live = ~hidden if batch_first else ~hidden.T

    def run(m):
        torch.manual_seed(3)
        return m(x.to(dtype_of(m)), src_key_padding_mask=hidden)

    model.double()
    got = {}
    for packed in (False, True):
        with tfk.patch(model, packed=packed, backend="reference") as report:
            got[packed] = results(model, run, live)
            assert report.fallbacks == {}
    compare(got[True], got[False], 1e-12)


def test_transformer():
    torch.manual_seed(0)
    model = nn.Transformer(16, 4, 1, 2, 32, 0.0, batch_first=True)
    src, hidden = masked_input()
    tgt = torch.randn(3, 5, 16, dtype=torch.float64)
    causal = nn.Transformer.generate_square_subsequent_mask(5)

    def run(m):
        dtype = dtype_of(m)
        return m(
            src.to(dtype), tgt.to(dtype), tgt_mask=causal.to(dtype), tgt_is_causal=True,
            src_key_padding_mask=hidden, memory_key_padding_mask=hidden,
        )  # fmt: skip

    assert_same_results(model, run)


HIDES = {  # memory_key_padding_mask, made of src_key_padding_mask -> whether padding in the memory stays unseen
    "nothing": (lambda hidden: None, False),
    "the same": (lambda hidden: hidden, True),
    "more": (lambda hidden: hidden | (torch.arange(7) == 1), True),
    "less": (lambda hidden: hidden & (torch.arange(7) != 6), False),
    "the same by -inf": (lambda hidden: torch.zeros(3, 7).masked_fill(hidden, -torch.inf), True),
    "the same by -9": (lambda hidden: hidden * -9.0, False),
}


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("hides", HIDES)
def test_a_decoder_that_sees_the_sources_padding_sees_what_it_saw(hides, batch_first):
    torch.manual_seed(0)
    model = nn.Transformer(16, 4, 2, 1, 32, 0.0, batch_first=batch_first).double()
    src, hidden = masked_input(batch_first)
    tgt = torch.randn(3, 5, 16, dtype=torch.float64)
    make, unseen = HIDES[hides]
    across = make(hidden)
    told = {"src_key_padding_mask": hidden, "memory_key_padding_mask": across}
    run = lambda m: m(src, tgt if batch_first else tgt.transpose(0, 1), **told)
    wanted, memory = results(model, run), []
    with tfk.patch(model, backend="reference") as report:
        compare(results(model, run), wanted, 1e-9)
        why = "memory_key_padding_mask shows what src_key_padding_mask hides"
        assert report.fallbacks == ({} if unseen else {"encoder": {why: 1}})
        model.encoder.register_forward_hook(lambda module, args, out: memory.append(out))
        run(model)
    padding = memory[0][hidden if batch_first else hidden.T]
    assert bool((padding == 0).all()) is unseen


@pytest.mark.parametrize("need_weights", [False, True])
def test_attention(need_weights):
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 4, kdim=12, vdim=10, batch_first=True)
    q, k, v = (torch.randn(2, n, e, dtype=torch.float64) for n, e in ((3, 16), (5, 12), (5, 10)))

    def run(m):
        inputs = (t.to(dtype_of(m)) for t in (q, k, v))
        out, weights = m(*inputs, need_weights=need_weights)
        return torch.cat([out.flatten(), weights.flatten()]) if need_weights else out

    assert_same_results(model, run)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.LayerNorm(16), nn.RMSNorm(16)),
        nn.LayerNorm((7, 16)),
        nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.0), nn.Linear(32, 16), nn.Dropout(0.0)),
        nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32, bias=False), nn.SiLU(), nn.Linear(32, 4)),
    ],
    ids=["norms", "norm2d", "ffn", "prenorm_ffn"],
)
def test_norms_and_feed_forward(model):
    x, _ = masked_input()
    assert_same_results(model, lambda m: m(x.to(dtype_of(m))))
    with tfk.patch(model) as report:
        assert report.replaced


@pytest.mark.parametrize("shared", [True, False])
def test_a_sequential_says_what_it_runs_itself(shared):
    """Blocks one after another, whose activations may be one object; the last Linear is called."""
    act = nn.GELU()
    again = act if shared else nn.GELU()
    model = nn.Sequential(nn.Linear(8, 16), act, nn.Linear(16, 8), again, nn.Linear(8, 4))
    x = torch.randn(3, 8)
    stock = model(x)
    with tfk.patch(model) as report:
        torch.testing.assert_close(model(x), stock)
        inside = {entry.name for entry in report.entries if "runs inside" in entry.note}
    assert {"0", "2"} <= inside and "4" not in inside


def test_convolutions_of_width_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(16, 32, 1), nn.ReLU(), nn.Dropout(0.0), nn.Conv1d(32, 16, 1))
    x, _ = masked_input()
    assert_same_results(model, lambda m: m(x.transpose(1, 2).to(dtype_of(m))))
    with tfk.patch(model):
        assert model(x.float().transpose(1, 2)).is_contiguous()
    wide = nn.Sequential(nn.Conv1d(16, 32, 3), nn.ReLU(), nn.Conv1d(32, 16, 1))
    assert not tfk.patch(wide).replaced


def test_nested_tensors_keep_torch_code():
    """torch's own stack, here behind a subclass that no recipe knows, hands its layers nested tensors in eval."""

    class Stack(nn.TransformerEncoder):
        pass

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = Stack(layer, 2).eval()
    x, hidden = masked_input()
    with torch.no_grad():
        wanted = model(x.float(), src_key_padding_mask=hidden)
        with tfk.patch(model):
            torch.testing.assert_close(model(x.float(), src_key_padding_mask=hidden), wanted)


class Relative(nn.Module):
    """Attention of somebody's own, written for the masks that torch's encoder layer hands on: floating, added."""

    batch_first = True

    def forward(self, query, key, value, attn_mask=None, key_padding_mask=None, need_weights=False, is_causal=False):
        scores = query @ key.transpose(-1, -2) / 4
        for mask in (attn_mask, None if key_padding_mask is None else key_padding_mask[:, None]):
            scores = scores if mask is None else scores + mask
        return scores.softmax(-1) @ value, None


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("stack", [False, True])
def test_attention_of_another_class_gets_the_masks_of_torchs_layer(norm_first, stack):
    model = encoder(norm_first=norm_first).train()
    for layer in model.layers:
        layer.self_attn = Relative()
    model = model if stack else model.layers[0]
    x, hidden = masked_input()
    future = torch.ones(7, 7, dtype=torch.bool).triu(1)
    masks = {"mask" if stack else "src_mask": future, "src_key_padding_mask": hidden}
    reason = "layer 0 cannot run packed: its attention is not fused" if stack else None
    run = lambda m: m(x.to(dtype_of(m)), **masks)
    wanted = results(model.double(), run)
    with tfk.patch(model, backend="reference") as report:
        compare(results(model, run), wanted, 1e-9)
        assert {why for met in report.fallbacks.values() for why in met} <= {reason}


def test_an_overridden_block_gets_the_masks_of_torchs_layer():
    seen = []

    class Layer(tfk.nn.TransformerEncoderLayer):
        def _sa_block(self, x, attn_mask, key_padding_mask, is_causal=False):
            seen.append((attn_mask, key_padding_mask))
            return super()._sa_block(x, attn_mask, key_padding_mask, is_causal)

    _, hidden = masked_input()
    layer, future = Layer(16, 4, 32, batch_first=True), torch.ones(7, 7, dtype=torch.bool).triu(1)
    layer(torch.randn(3, 7, 16), future, hidden)
    for given, mask in zip(seen[0], (future, hidden), strict=True):
        assert given.dtype == torch.float32 and torch.equal(given == -torch.inf, mask) and bool((given <= 0).all())


class MeanNorm(nn.Module):
    """Looks along the sequence, which a packed batch does not have."""

    def forward(self, x):
        return x - x.mean(1, keepdim=True)


def test_a_last_norm_that_is_not_known_sees_the_padded_batch():
    model = encoder()
    model.norm = MeanNorm()
    x, hidden = masked_input()
    run = lambda m: m(x.to(dtype_of(m)), src_key_padding_mask=hidden)
    wanted = run(model.double())
    with tfk.patch(model) as report:
        torch.testing.assert_close(run(model)[~hidden], wanted[~hidden])
        assert report.fallbacks[""] == {"norm is MeanNorm, not LayerNorm or RMSNorm": 1}
    model = encoder()
    seen = []
    model.norm.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    with tfk.patch(model) as report:
        run(model)
        assert seen == [(3, 7, 16)] and report.fallbacks[""] == {"norm has hooks": 1}


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("place", ["norm", "layers.0.norm1", "layers.1.norm2"])
def test_a_norm_over_the_sequence_too_sees_the_padded_batch(place, norm_first):
    kind = nn.RMSNorm if place == "norm" and norm_first else nn.LayerNorm
    model = encoder(norm_first=norm_first)
    owner, _, name = place.rpartition(".")
    setattr(model.get_submodule(owner), name, kind((7, 16)))
    x, hidden = masked_input()
    run = lambda m: m(x.to(dtype_of(m)), src_key_padding_mask=hidden)
    wanted = run(model.double())
    with tfk.patch(model, backend="reference") as report:
        torch.testing.assert_close(run(model), wanted)
        number = f"layer {owner[-1]} cannot run packed: " if owner else ""
        assert report.fallbacks[""] == {f"{number}{name} normalises more than the last dimension": 1}


def test_an_attention_given_back_alone_runs_padded():
    model = encoder()
    x, hidden = masked_input()
    run = lambda m: m(x.to(dtype_of(m)), src_key_padding_mask=hidden)
    wanted = run(model)
    with tfk.patch(model) as report:
        tfk.unpatch(model.layers[0].self_attn)
        torch.testing.assert_close(run(model)[~hidden], wanted[~hidden])
        assert report.fallbacks[""] == {"layer 0 cannot run packed: its attention is not fused": 1}


def test_padding_of_an_unbatched_input_is_torchs_error():
    model = encoder()
    with tfk.patch(model), pytest.raises((ValueError, AssertionError, RuntimeError), match="key_padding_mask"):
        model(torch.randn(3, 7, 16), src_key_padding_mask=torch.ones(7, dtype=torch.bool))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_a_sequence_takes_nested_tensors(layout):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).eval()
    rows = [torch.randn(length, 16) for length in (3, 5)]
    nested = torch.nested.nested_tensor(rows, layout=layout)
    wanted = model(nested)
    with tfk.patch(model) as report:
        given = model(nested)
        assert "dense" in str(report.fallbacks[""])
    assert given.layout == layout and all(map(torch.equal, given.unbind(), wanted.unbind()))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sequence_takes_sparse_rows(layout):
    """A bag of words, which a Linear multiplies by its weight as it is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    x = torch.randn(5, 16).relu().to_sparse(layout=layout)
    stock = model(x)
    tfk.patch(model)
    assert torch.equal(model(x), stock)


class Reversed(nn.Sequential):
    """Runs its children from the last to the first."""

    def __iter__(self):
        return reversed(list(self._modules.values()))


def test_a_sequence_in_another_order_and_a_slice_of_a_patched_one():
    model = Reversed(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    x = torch.randn(3, 16)
    wanted = model(x)
    tfk.patch(model)
    torch.testing.assert_close(model(x), wanted)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh())
    tfk.patch(model)
    part = model[:3]  # a new module, which shares the layers
    assert type(part) is nn.Sequential and model[1] is part[1] and type(model) is not nn.Sequential
    wanted = part(x)
    tfk.unpatch(model)
    torch.testing.assert_close(part(x), wanted)
    assert [entry.name for entry in tfk.patch(part).replaced][0] == ""


class Beginning(nn.Module):
    """Runs what lies before the last layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh())

    def forward(self, x):
        return self.layers[:-1](x)


def test_a_slice_is_taken_in_compiled_code():
    model, x = Beginning(), torch.randn(3, 16)
    wanted = model(x)
    tfk.patch(model)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(x), wanted)
    assert len(copy.deepcopy(model.layers)) == 4 and type(copy.deepcopy(model.layers)) is type(model.layers)


def test_attention_trains_on_what_inference_mode_made():
    torch.manual_seed(0)
    stock = nn.MultiheadAttention(16, 2, batch_first=True)
    with torch.inference_mode():
        x, y = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    mine = copy.deepcopy(stock)
    tfk.patch(mine, backend="cpu")
    for given in ((x, x, x), (x.clone(), y, y)):
        for model in (stock, mine):
            model.zero_grad()
            model(*given, need_weights=False)[0].square().sum().backward()
        torch.testing.assert_close(mine.in_proj_weight.grad, stock.in_proj_weight.grad)
