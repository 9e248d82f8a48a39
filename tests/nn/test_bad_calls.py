# ruff: noqa: E501  (a call and the sentence it must raise belong on one line)
"""Bad constructions and bad calls: one sentence each, ValueError or TypeError, with the names and the numbers."""

import pytest
import torch

import tfm_kernels as tfk

X, MEMORY, IDS = torch.zeros(2, 5, 12), torch.zeros(2, 7, 12), torch.zeros(2, 5, dtype=torch.int64)
FIRST = {"batch_first": True}
N = tfk.nn


def attention(**options):
    return N.MultiheadAttention(12, 4, **{**FIRST, **options})


CONSTRUCTIONS = [
    (lambda: N.MultiheadAttention(10, 3), ValueError, "embed_dim must be divisible by num_heads, got embed_dim 10 and num_heads 3"),
    (lambda: N.MultiheadAttention(0, 1), ValueError, "embed_dim must be at least 1, got 0"),
    (lambda: N.MultiheadAttention(8, 0), ValueError, "num_heads must be at least 1, got 0"),
    (lambda: N.MultiheadAttention(8.0, 2), TypeError, "embed_dim must be an int, got float"),
    (lambda: N.MultiheadAttention(8, True), TypeError, "num_heads must be an int, got bool"),
    (lambda: N.MultiheadAttention(8, 2, dropout=1.5), ValueError, r"dropout must lie in \[0, 1\], got 1.5"),
    (lambda: N.MultiheadAttention(8, 2, dropout="0"), TypeError, "dropout must be a number, got str"),
    (lambda: N.MultiheadAttention(8, 2, kdim=0), ValueError, "kdim must be at least 1, got 0"),
    (lambda: N.MultiheadAttention(8, 2, vdim=2.5), TypeError, "vdim must be an int, got float"),
    (lambda: N.MultiheadAttention(8, 2, backend="gpu"), ValueError, "backend must be one of .*, got 'gpu'"),
    (lambda: N.LayerNorm(0), ValueError, "normalized_shape must be at least 1, got 0"),
    (lambda: N.LayerNorm([]), ValueError, r"normalized_shape must have at least one dimension, got \[\]"),
    (lambda: N.LayerNorm([4, 2.0]), TypeError, "normalized_shape must be an int, got float"),
    (lambda: N.LayerNorm(None), TypeError, "normalized_shape must be an int or a list or tuple of ints, got NoneType"),
    (lambda: N.LayerNorm("8"), TypeError, "normalized_shape must be an int or a list or tuple of ints, got str"),
    (lambda: N.LayerNorm(8, eps=-1.0), ValueError, "eps must be a finite number >= 0, got -1.0"),
    (lambda: N.LayerNorm(8, eps=None), TypeError, "eps must be a number, got NoneType"),
    (lambda: N.LayerNorm(8, backend=1), ValueError, "backend must be one of .*, got 1"),
    (lambda: N.RMSNorm((4, -1)), ValueError, "normalized_shape must be at least 1, got -1"),
    (lambda: N.RMSNorm(8, eps=float("nan")), ValueError, "eps must be a finite number >= 0, got nan"),
    (lambda: N.TransformerEncoderLayer(10, 4), ValueError, "d_model must be divisible by nhead, got d_model 10 and nhead 4"),
    (lambda: N.TransformerEncoderLayer(8, 2, 0), ValueError, "dim_feedforward must be at least 1, got 0"),
    (lambda: N.TransformerEncoderLayer(8, 2, dropout=-0.1), ValueError, r"dropout must lie in \[0, 1\], got -0.1"),
    (lambda: N.TransformerEncoderLayer(8, 2, activation="tanh"), ValueError, "activation must be one of relu, gelu, .*, got 'tanh'"),
    (lambda: N.TransformerEncoderLayer(8, 2, activation=3), TypeError, "activation must be a name or a callable, got int"),
    (lambda: N.TransformerEncoderLayer(8, 2, backend="mps"), ValueError, "backend must be one of .*, got 'mps'"),
    (lambda: N.TransformerDecoderLayer(9, 2), ValueError, "d_model must be divisible by nhead, got d_model 9 and nhead 2"),
    (lambda: N.TransformerDecoderLayer(8, 2, 16.0), TypeError, "dim_feedforward must be an int, got float"),
    (lambda: N.TransformerEncoder("layer", 2), TypeError, "encoder_layer must be a module, got str"),
    (lambda: N.TransformerEncoder(torch.nn.Identity(), -1), ValueError, "num_layers must be at least 0, got -1"),
    (lambda: N.TransformerEncoder(torch.nn.Identity(), 2.0), TypeError, "num_layers must be an int, got float"),
    (lambda: N.TransformerEncoder(torch.nn.Identity(), 2, "norm"), TypeError, "norm must be a module or None, got str"),
    (lambda: N.TransformerDecoder(torch.nn.Identity(), 2, backend="x"), ValueError, "backend must be one of .*, got 'x'"),
    (lambda: N.TransformerDecoder(None, 2), TypeError, "decoder_layer must be a module, got NoneType"),
    (lambda: N.Transformer(10, 4), ValueError, "Transformer: d_model must be divisible by nhead, got d_model 10 and nhead 4"),
    (lambda: N.FeedForward(0), ValueError, "d_model must be at least 1, got 0"),
    (lambda: N.FeedForward(8, 16, 2.0), ValueError, r"dropout must lie in \[0, 1\], got 2.0"),
    (lambda: N.FeedForward(8, 16, activation="swish"), ValueError, "activation must be one of relu, .*, got 'swish'"),
    (lambda: N.LinearCrossEntropyLoss(0, 8), ValueError, "in_features must be at least 1, got 0"),
    (lambda: N.LinearCrossEntropyLoss(8, 0), ValueError, "num_classes must be at least 1, got 0"),
    (lambda: N.LinearCrossEntropyLoss(8, 2.0), TypeError, "num_classes must be an int, got float"),
    (lambda: N.LinearCrossEntropyLoss(8, 2, out_features=3), TypeError, "out_features must be a tuple of ints, got int"),
    (lambda: N.LinearCrossEntropyLoss(8, 2, out_features=(3, 0)), ValueError, "each size in out_features must be at least 1, got 0"),
    (lambda: N.LinearCrossEntropyLoss(8, 2, reduction="avg"), ValueError, "reduction must be one of mean, sum, none, got 'avg'"),
    (lambda: N.LinearCrossEntropyLoss(8, 2, weight=torch.ones(3)), ValueError, r"weight must have shape \(2,\) to match num_classes, got \(3,\)"),
    (lambda: N.LinearCrossEntropyLoss(8, 2, weight=[1.0, 2.0]), TypeError, "weight must be a tensor or None, got list"),
    (lambda: N.LinearCrossEntropyLoss(8, 2, ignore_index=1.0), TypeError, "ignore_index must be an int, got float"),
    (lambda: N.LinearCrossEntropyLoss(8, 2, label_smoothing=2.0), ValueError, r"label_smoothing must lie in \[0, 1\], got 2.0"),
    (lambda: N.LinearCrossEntropyLoss(8, 2, backend="gpu"), ValueError, "backend must be one of .*, got 'gpu'"),
    (lambda: N.PositionalEncoding(0), ValueError, "d_model must be at least 1, got 0"),
    (lambda: N.PositionalEncoding(8, max_len=0), ValueError, "max_len must be at least 1, got 0"),
    (lambda: N.TokenEmbedding(0, 8), ValueError, "vocab_size must be at least 1, got 0"),
    (lambda: N.TokenEmbedding(8, 8, padding_idx=8), ValueError, "padding_idx must be below vocab_size 8, got 8"),
]  # fmt: skip

CALLS = [
    (lambda: attention()(X[..., :8], X, X), ValueError, r"query must have embed_dim 12 as its last size, got \(2, 5, 8\)"),
    (lambda: attention()(X, X[..., :8], X), ValueError, r"key must have kdim 12 as its last size, got \(2, 5, 8\)"),
    (lambda: attention(vdim=6)(X, X, X), ValueError, r"value must have vdim 6 as its last size, got \(2, 5, 12\)"),
    (lambda: attention()(None, X, X), TypeError, "query must be a tensor, got NoneType"),
    (lambda: attention()(X[None], X[None], X[None]), ValueError, "must all be batched, 3-D, or all unbatched, 2-D, got shapes"),
    (lambda: attention()(X, X[0], X[0]), ValueError, r"got shapes \(2, 5, 12\), \(5, 12\) and \(5, 12\)"),
    (lambda: attention()(X, MEMORY, X), ValueError, r"value must have shape \(2, 7, 12\) to match key \(2, 7, 12\), got \(2, 5, 12\)"),
    (lambda: attention()(X, MEMORY[:1], MEMORY[:1]), ValueError, r"key must have the batch size 2 of query \(2, 5, 12\), got shape \(1, 7, 12\)"),
    (lambda: attention()(X, X, X, attn_mask=torch.zeros(5, 4)), ValueError, r"attn_mask must have shape \(5, 5\) or \(8, 5, 5\), .*, got \(5, 4\)"),
    (lambda: attention()(X, X, X, attn_mask=torch.zeros(2, 5, 5)), ValueError, r"attn_mask must have shape .*, got \(2, 5, 5\)"),
    (lambda: attention()(X, X, X, attn_mask=torch.zeros(5, 5).int()), ValueError, r"attn_mask must be bool \(True = ignore\) or floating .*, got int32"),
    (lambda: attention()(X, X, X, attn_mask=[[0]]), TypeError, "attn_mask must be a tensor, got list"),
    (lambda: attention()(X, X, X, attn_mask=torch.zeros(5, 5, device="meta")), ValueError, "attn_mask must be on query's device cpu, got meta"),
    (lambda: attention()(X, X, X, torch.zeros(2, 4)), ValueError, r"key_padding_mask must have shape \(2, 5\) to match .*, got \(2, 4\)"),
    (lambda: attention()(X, X, X, torch.zeros(5, 2).bool()), ValueError, r"key_padding_mask must have shape \(2, 5\)"),
    (lambda: attention()(X, X, X, torch.zeros(2, 5).long()), ValueError, "key_padding_mask must be bool .*, got int64"),
    (lambda: attention()(X, X, X, True), TypeError, "key_padding_mask must be a tensor, got bool"),
    (lambda: attention()(X[0], X[0], X[0], torch.zeros(2, 5)), ValueError, r"key_padding_mask must have shape \(5,\)"),
    (lambda: attention()(X, X, X, attn_mask=tfk.Mask.lengths(torch.tensor([1, 2, 3]))), ValueError, r"key_lengths must have shape \(2,\)"),
    (lambda: attention()(*[torch.nested.nested_tensor([X[0], X[1]])] * 3), ValueError, "padded tensors with a key_padding_mask, got a nested one"),
    (lambda: N.LayerNorm((3, 4))(X), ValueError, r"input must end in normalized_shape \(3, 4\), got shape \(2, 5, 12\)"),
    (lambda: N.LayerNorm(8)(X), ValueError, r"input must end in normalized_shape \(8,\), got shape \(2, 5, 12\)"),
    (lambda: N.LayerNorm(12)([1.0]), TypeError, "input must be a tensor, got list"),
    (lambda: N.LayerNorm(12)(X.int()), ValueError, "must be float16, bfloat16, float32 or float64, got int32"),
    (lambda: N.RMSNorm(8)(X), ValueError, r"input must end in normalized_shape \(8,\)"),
    (lambda: N.FeedForward(8)(X), ValueError, r"x must have d_model 8 as its last size, got \(2, 5, 12\)"),
    (lambda: N.FeedForward(12)(torch.tensor(1.0)), ValueError, r"x must have d_model 12 as its last size, got \(\)"),
    (lambda: N.FeedForward(12)(X.double()), ValueError, "x float64"),
    (lambda: N.LinearCrossEntropyLoss(8, 4)(X, IDS), ValueError, r"input must have in_features 8 as its last size, got \(2, 5, 12\)"),
    (lambda: N.LinearCrossEntropyLoss(12, 4)([1.0], IDS), TypeError, "input must be a tensor, got list"),
    (lambda: N.LinearCrossEntropyLoss(12, 4)(X, 3), TypeError, "target must be a tensor, got int"),
    (lambda: N.LinearCrossEntropyLoss(12, 4)(X, IDS[0]), ValueError, r"target must be int64 of shape \(2, 5\), class numbers, or floating of shape \(2, 5, 4\), .*, got int64 of shape \(5,\)"),
    (lambda: N.LinearCrossEntropyLoss(12, 4)(X, IDS.int()), ValueError, r"got int32 of shape \(2, 5\)"),
    (lambda: N.LinearCrossEntropyLoss(12, 4)(X, IDS.float()), ValueError, r"got float32 of shape \(2, 5\)"),
    (lambda: N.LinearCrossEntropyLoss(12, 4)(X, IDS[..., None].expand(2, 5, 4)), ValueError, r"got int64 of shape \(2, 5, 4\)"),
    (lambda: N.LinearCrossEntropyLoss(12, 4, out_features=(3,))(X, IDS), ValueError, r"target must be int64 of shape \(2, 5, 3\), .* floating of shape \(2, 5, 4, 3\)"),
    (lambda: N.LinearCrossEntropyLoss(12, 4, out_features=(3,))(X[0, 0], IDS[0]), ValueError, r"input must be batched, \(N, 12\), where there are out_features \(3,\), got shape \(12,\)"),
    (lambda: N.LinearCrossEntropyLoss(12, 4, ignore_index=3)(X, X[..., :4]), ValueError, "ignore_index must be None where target holds probabilities, got 3"),
    (lambda: N.LinearCrossEntropyLoss(12, 4)(X, IDS + 4), ValueError, r"target must lie in \[0, 4\) or be ignore_index -100, got 4 at \[0, 0\]"),
    (lambda: N.LinearCrossEntropyLoss(12, 4)(X.double(), IDS), ValueError, "x float64"),
    (lambda: N.TransformerEncoderLayer(8, 2)(X), ValueError, r"src must have d_model 8 as its last size, got \(2, 5, 12\)"),
    (lambda: N.TransformerEncoderLayer(12, 2)(X[None]), ValueError, r"src must be batched, 3-D, or unbatched, 2-D, got shape \(1, 2, 5, 12\)"),
    (lambda: N.TransformerEncoderLayer(12, 2)(torch.nested.nested_tensor([X[0]])), ValueError, "src must be a padded tensor .*, got a nested tensor"),
    (lambda: N.TransformerEncoderLayer(12, 2)(3), TypeError, "src must be a tensor, got int"),
    (lambda: N.TransformerEncoderLayer(12, 2, **FIRST)(X, torch.zeros(4, 4)), ValueError, r"attn_mask must have shape \(5, 5\)"),
    (lambda: N.TransformerDecoderLayer(12, 2)(X, X[..., :8]), ValueError, r"memory must have d_model 12 as its last size, got \(2, 5, 8\)"),
    (lambda: N.TransformerDecoderLayer(12, 2)(X[..., :8], X), ValueError, "tgt must have d_model 12 as its last size"),
    (lambda: N.TransformerDecoderLayer(12, 2, **FIRST)(X, MEMORY[:1]), ValueError, "key must have the batch size 2 of query"),
    (lambda: N.Transformer(12, 2, 1, 1, 8)(X[..., :8], X), ValueError, "src must have d_model 12 as its last size"),
    (lambda: N.Transformer(12, 2, 1, 1, 8)(X, MEMORY[..., :8]), ValueError, "tgt must have d_model 12 as its last size"),
    (lambda: N.Transformer(12, 2, 1, 1, 8, **FIRST)(X, X[:1]), ValueError, r"src and tgt must have one batch size, got shapes \(2, 5, 12\) and \(1, 5, 12\)"),
    (lambda: N.Transformer(12, 2, 1, 1, 8)(X, MEMORY), ValueError, "with batch_first=False"),
    (lambda: N.Transformer(12, 2, 1, 1, 8)(X, X[0]), ValueError, "src and tgt must have one batch size"),
    (lambda: N.PositionalEncoding(12, max_len=4)(X), ValueError, r"positions must lie in \[0, 4\), max_len, got 0 to 4"),
    (lambda: N.PositionalEncoding(12, max_len=8)(X, offset=-1), ValueError, "got -1 to 3"),
    (lambda: N.PositionalEncoding(8)(X), ValueError, "x must have d_model 8 as its last size"),
    (lambda: N.PositionalEncoding(12)(X[None]), ValueError, r"x must be \(B, T, E\) or \(T, E\), got shape \(1, 2, 5, 12\)"),
    (lambda: N.TokenEmbedding(8, 8)(X), ValueError, "ids must be int32 or int64, got float32"),
    (lambda: N.TokenEmbedding(8, 8)([1]), TypeError, "ids must be a tensor, got list"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("call", "kind", "sentence"), CONSTRUCTIONS + CALLS)
def test_bad_calls_say_what_is_wrong(call, kind, sentence):
    with pytest.raises(kind, match=sentence) as caught:
        call()
    text = str(caught.value)
    assert type(caught.value) is kind and "\n" not in text and len(text) < 240 and ": " in text
