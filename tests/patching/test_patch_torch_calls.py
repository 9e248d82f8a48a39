"""patch() on torch.nn's own modules: calls by name, and layers whose attention sees more than the tokens."""

import inspect

import pytest
from torch import nn

import tfm_kernels as tfk
from tests.patching.models import compare, encoder
from tests.patching.test_patch_torch_nn import masked_input


def test_arguments_by_name():
    """Every one of them, as the stock layers take them."""
    x, hidden = masked_input()
    x, future = x.float(), nn.Transformer.generate_square_subsequent_mask(7)
    sees, is_padding = {"tgt_mask": future}, {"src_key_padding_mask": hidden}
    named = dict(d_model=16, nhead=2, dim_feedforward=32, batch_first=True)
    for module, given in (
        (nn.LayerNorm(16), {"input": x}),
        (nn.RMSNorm(16), {"x": x}),
        (nn.Linear(16, 4), {"input": x}),
        (
            nn.MultiheadAttention(16, 2, batch_first=True),
            {"value": x, "key": x, "query": x, "key_padding_mask": hidden},
        ),
        (nn.TransformerEncoderLayer(**named), {"src": x, **is_padding}),
        (nn.TransformerDecoderLayer(**named), {"memory": x.flip(0), "tgt": x, **sees}),
        (encoder(), {"src": x, **is_padding}),
        (nn.Transformer(**named, num_encoder_layers=1, num_decoder_layers=1), {"tgt": x, "src": x, **sees}),
    ):
        module, own = module.eval(), inspect.signature(module.forward).parameters
        wanted = module(**given)
        with tfk.patch(module):
            got = module(**given)
            assert set(own) <= set(inspect.signature(module.forward).parameters), type(module)
        each = (result if isinstance(result, tuple) else (result,) for result in (got, wanted))
        compare(*({name: t.masked_fill(hidden[..., None], 0.0) for name, t in enumerate(ts)} for ts in each), 1e-5)


@pytest.mark.parametrize("more", ["add_bias_kv", "add_zero_attn"])
def test_attention_to_more_than_the_tokens(more):
    """Runs, and not packed."""
    model = encoder()
    model.layers[1].self_attn = nn.MultiheadAttention(16, 4, batch_first=True, **{more: True})
    x, hidden = masked_input()
    model.double()
    wanted = model(x, src_key_padding_mask=hidden)
    with tfk.patch(model, backend="reference") as report:
        found = model(x, src_key_padding_mask=hidden)
        (met,) = report.fallbacks.values()
    compare({"live": found[~hidden]}, {"live": wanted[~hidden]}, 1e-12)
    assert [*met] == ["layer 1 cannot run packed: its attention has add_bias_kv, add_zero_attn, kdim or vdim"]
