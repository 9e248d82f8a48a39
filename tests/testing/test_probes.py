"""The exact probes bite: a wrong mask, another dropout mask, padding that is read, strides that are ignored."""

import pytest
import torch

from tfm_kernels import Mask, dropout, ops
from tfm_kernels.testing import ContractError, assert_contract, exact, invariance
from tfm_kernels.testing.data import CLASSES, LAYOUTS, draw, lay_out
from tfm_kernels.testing.derivative import assert_gradcheck

RIGHT, RIGHT_NORM = ops.attention, ops.layer_norm


def wrong(monkeypatch, function, name="attention"):
    monkeypatch.setattr(ops, name, function)


def shifted(query, key, value, mask=None, **options):
    keep = torch.roll(mask.dense(*query.shape[:3], key.shape[2]), 1, -1)
    return RIGHT(query, key, value, Mask.keep(keep), **options)


def test_shifted_mask(monkeypatch):
    wrong(monkeypatch, shifted)
    for mask in (Mask.causal(), Mask.lengths(torch.tensor([3, 9])), Mask.window(2, 1)):
        with pytest.raises(ContractError, match=r"out: pair \[.*\] is (not )?seen; \d+ of 162 pairs"):
            exact.assert_mask_support("reference", mask, (2, 1, 9, 9))


def test_bias_hides(monkeypatch):
    bias = torch.zeros(1, 1, 9, 9)
    bias[..., 4] = -torch.inf
    exact.assert_mask_support("reference", Mask.causal(), (2, 1, 9, 9), bias=bias)
    wrong(monkeypatch, lambda *args, bias=None, **options: RIGHT(*args, bias=None, **options))
    with pytest.raises(ContractError, match="is seen"):
        exact.assert_mask_support("reference", Mask.causal(), (2, 1, 9, 9), bias=bias)


def test_other_dropout_mask(monkeypatch):
    exact.assert_mask_support("reference", Mask.causal(), (2, 2, 9, 9), dropout_p=0.4, seed=3)
    wrong(monkeypatch, lambda *args, seed=None, **options: RIGHT(*args, seed=seed + 1, **options))
    with pytest.raises(ContractError, match="is (not )?seen"):
        exact.assert_mask_support("reference", Mask.causal(), (2, 2, 9, 9), dropout_p=0.4, seed=3)


def test_dropout_without_its_scale(monkeypatch):
    monkeypatch.setattr(dropout, "keep_scale", lambda p: 1.0)
    with pytest.raises(ContractError, match="the weight of pair .* expected 1/"):
        exact.assert_mask_support("reference", Mask.causal(), (2, 2, 9, 9), dropout_p=0.4, seed=3)


def attention_inputs():
    g = torch.Generator().manual_seed(1)
    new = lambda *shape: torch.randn(*shape, generator=g)
    return {"query": new(2, 2, 5, 4), "key": new(2, 2, 7, 4), "value": new(2, 2, 7, 4)}


def test_padding_that_is_read(monkeypatch):
    invariance.assert_padding_unread(attention_inputs(), torch.tensor([7, 4]), "reference")

    def reading(query, key, value, mask=None, **options):
        return RIGHT(query, key, value, mask, **options) + 0 * value.sum()

    wrong(monkeypatch, reading)
    with pytest.raises(ContractError, match="padding of nan against 0"):
        invariance.assert_padding_unread(attention_inputs(), torch.tensor([7, 4]), "reference")


def test_hidden_keys_that_are_read(monkeypatch):
    inputs = {**attention_inputs(), "mask": Mask.causal()}
    invariance.assert_hidden_keys_unread(inputs, "reference")
    with pytest.raises(ValueError, match="every key is seen"):
        invariance.assert_hidden_keys_unread(attention_inputs(), "reference")

    def reading(query, key, value, mask=None, **options):
        return RIGHT(query, key, value, mask, **options) + 0 * key[:, :, 6:].sum()

    wrong(monkeypatch, reading)
    with pytest.raises(ContractError, match="padding of nan against 0"):
        invariance.assert_hidden_keys_unread(inputs, "reference")


def test_nan_that_is_lost_and_nan_that_spreads(monkeypatch):
    inputs, right = {"x": torch.randn(5, 8)}, ops.rms_norm
    invariance.assert_nan_stays_in_its_row("rms_norm", inputs, "reference")
    monkeypatch.setattr(ops, "rms_norm", lambda x, **options: right(x, **options).nan_to_num())
    with pytest.raises(ContractError, match="that row of y must be NaN"):
        invariance.assert_nan_stays_in_its_row("rms_norm", inputs, "reference")
    monkeypatch.setattr(ops, "rms_norm", lambda x, **options: right(x, **options) + 0 * x.sum())
    with pytest.raises(ContractError, match="NaN in row 2 of x: 32 of 32 elements differ"):
        invariance.assert_nan_stays_in_its_row("rms_norm", inputs, "reference")


def test_strides_that_are_ignored(monkeypatch):
    def ignoring(query, key, value, **options):
        flat = torch.as_strided(key, key.shape, (56, 28, 4, 1)) if key.stride() != (0, 28, 4, 1) else key
        return RIGHT(query, flat, value, **options)

    wrong(monkeypatch, ignoring)
    with pytest.raises((ContractError, RuntimeError)):
        invariance.assert_view_equals_contiguous("attention", attention_inputs(), "reference")


def test_heads_that_are_mixed(monkeypatch):
    invariance.assert_batch_and_heads_independent(attention_inputs(), "reference")
    wrong(monkeypatch, lambda query, key, value, **options: RIGHT(query, key[:, :1].expand_as(key), value, **options))
    with pytest.raises(ContractError, match="batch and heads permuted"):
        invariance.assert_batch_and_heads_independent(attention_inputs(), "reference")


def test_integers_that_are_rounded(monkeypatch):
    for op in ("ffn", "attention"):
        inputs = exact.integers(op, torch.bfloat16)
        exact.assert_exact(op, inputs, "reference", backward=op == "ffn")
        right = getattr(ops, op)
        wrong(monkeypatch, lambda *args, _right=right, **options: _right(*args, **options) * (1 + 2**-7), op)
        with pytest.raises(ContractError, match=f"{op}: backend 'reference': .* must be exact on small integers"):
            exact.assert_exact(op, inputs, "reference", backward=False)


def test_results_that_do_not_repeat(monkeypatch):
    calls = []

    def restless(x, **options):
        calls.append(x)
        return torch.nn.functional.layer_norm(x, x.shape[-1:]) * (1 + len(calls) * 2.0**-23)

    wrong(monkeypatch, restless, "layer_norm")
    with pytest.raises(ContractError, match="y: C6 broken.*differs from a second run"):
        assert_contract("layer_norm", {"x": torch.randn(4, 64)}, "reference")


def test_inputs_that_are_changed(monkeypatch):
    wrong(
        monkeypatch,
        lambda x, **options: torch.nn.functional.layer_norm(x, x.shape[-1:]) + 0 * x.data.add_(1),
        "layer_norm",
    )
    with pytest.raises(ContractError, match="x: form broken.*the call changed its argument"):
        assert_contract("layer_norm", {"x": torch.randn(4, 64)}, "reference", backward=False)


def test_gradients_that_are_missing(monkeypatch):
    right = ops.layer_norm
    wrong(monkeypatch, lambda x, weight, **options: right(x, weight.detach(), **options), "layer_norm")
    with pytest.raises(ContractError, match="dweight: form broken.*no gradient reached the argument"):
        assert_contract("layer_norm", {"x": torch.randn(4, 64), "weight": torch.randn(64)}, "reference")


def test_gradients_that_are_wrong(monkeypatch):
    right = ops.layer_norm
    wrong(monkeypatch, lambda x, **options: right(x, **options) + 0.5 * (x - x.detach()), "layer_norm")
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        assert_gradcheck("layer_norm", {"x": torch.randn(2, 5)}, "reference")


@pytest.mark.parametrize("shape", [(5,), (0, 3), (2, 3, 4)], ids=str)
def test_data_has_the_shape_it_was_asked_for(shape):
    for name in CLASSES:
        t = draw(name, shape, torch.float32, torch.Generator().manual_seed(0))
        assert t.shape == shape, name
        for layout in LAYOUTS:
            assert lay_out(t, layout).shape == shape, (name, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_number_can_be_laid_out(layout):
    assert lay_out(torch.tensor(3.0), layout).item() == 3.0


def test_a_backward_by_another_mask(monkeypatch):
    right = ops.attention

    def other_backward(query, key, value, mask=None, **options):
        given, taken = (right(query, key, value, each, **options) for each in (mask, Mask.window(1, 0)))
        return taken + (given - taken).detach()

    wrong(monkeypatch, other_backward, "attention")
    with pytest.raises(ContractError, match="dvalue: pair"):
        exact.assert_mask_support("reference", Mask.causal(), (2, 1, 9, 9))
