"""TokenEmbedding and PositionalEncoding: the formulas, element by element."""

import math

import pytest
import torch

import tfm_kernels as tfk

from .twins import randn


@pytest.mark.parametrize("width", [1, 2, 7, 12])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_positions_follow_the_formula(width, dtype):
    pe = tfk.nn.PositionalEncoding(width, max_len=50, dtype=dtype).pe
    assert pe.shape == (50, width) and pe.dtype == dtype
    for t in (0, 1, 17, 49):
        for i in range(width):
            angle = t / 10000 ** (2 * (i // 2) / width)
            expected = math.sin(angle) if i % 2 == 0 else math.cos(angle)
            assert abs(pe[t, i].item() - expected) <= 1e-12 + torch.finfo(dtype).eps


def test_positions_are_added_along_the_right_axis():
    x = randn(3, 5, 8)
    module = tfk.nn.PositionalEncoding(8, 0.0, dtype=torch.float64)
    assert torch.equal(module(x), x + module.pe[:5])
    assert torch.equal(module(x[0]), x[0] + module.pe[:5])
    assert torch.equal(module(x[:, 3:], offset=3), module(x)[:, 3:])
    first = tfk.nn.PositionalEncoding(8, 0.0, batch_first=False, dtype=torch.float64)
    assert torch.equal(first(x.transpose(0, 1)), module(x).transpose(0, 1))
    assert torch.equal(first(x[0]), module(x)[0])


def test_positions_are_no_parameter_and_not_in_the_state():
    module = tfk.nn.PositionalEncoding(8)
    assert not list(module.parameters()) and not module.state_dict() and list(dict(module.named_buffers())) == ["pe"]
    assert module.max_len == 5000 and module.half().pe.dtype == torch.float16
    assert "8" in repr(module)


def test_positions_drop_after_the_sum():
    module = tfk.nn.PositionalEncoding(8, 0.5)
    y = module(torch.full((2, 100, 8), 5.0))
    assert 0.4 < (y == 0).float().mean() < 0.6
    assert not (module.eval()(torch.full((2, 100, 8), 5.0)) == 0).any()


def test_positions_on_the_meta_device_come_back():
    module = tfk.nn.PositionalEncoding(8, device="meta").to_empty(device="cpu")
    module.reset_parameters()
    assert torch.equal(module.pe, tfk.nn.PositionalEncoding(8).pe)


def test_positions_keep_the_dtype_of_the_input():
    module = tfk.nn.PositionalEncoding(8).eval()
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert module(torch.zeros(2, 3, 8, dtype=dtype)).dtype == dtype


def test_embedding_scales_and_starts_with_variance_one():
    torch.manual_seed(0)
    module = tfk.nn.TokenEmbedding(1000, 64, padding_idx=3)
    ids = torch.tensor([[1, 2, 3], [999, 0, 5]])
    assert torch.equal(module(ids), module.weight[ids] * 8.0)
    assert list(module.state_dict()) == ["weight"] and isinstance(module, torch.nn.Embedding)
    assert abs(module(torch.arange(1000)).std() - 1.0) < 0.02
    assert not module.weight[3].any()
    module(ids).sum().backward()
    assert not module.weight.grad[3].any() and module.weight.grad[1].any()


def test_embedding_shares_its_weight_with_an_output_layer():
    module, output = tfk.nn.TokenEmbedding(20, 8), torch.nn.Linear(8, 20, bias=False)
    output.weight = module.weight
    output(module(torch.tensor([1, 2]))).sum().backward()
    assert module.weight.grad is output.weight.grad is not None


def test_ready_embeddings_are_taken_as_they_are():
    rows = randn(10, 4)
    table = tfk.nn.TokenEmbedding.from_pretrained(rows, padding_idx=2)
    assert table.weight.data_ptr() == rows.data_ptr() and not table.weight.requires_grad and table.padding_idx == 2
    ids = torch.tensor([[1, 2, 9]])
    assert torch.equal(table(ids), rows[ids] * 2.0)
    assert tfk.nn.TokenEmbedding.from_pretrained(rows, freeze=False).weight.requires_grad
    for wrong in (rows[0], rows[None]):
        with pytest.raises(ValueError, match=r"from_pretrained: embeddings must have shape \(vocab_size, "):
            tfk.nn.TokenEmbedding.from_pretrained(wrong)


def test_positions_begin_within_the_table():
    module = tfk.nn.PositionalEncoding(8, max_len=16)
    for offset in (-5, -1, 12):
        with pytest.raises(
            ValueError, match=rf"positions must lie in \[0, 16\), max_len, got {offset} to {offset + 4}"
        ):
            module(torch.zeros(1, 5, 8), offset)
