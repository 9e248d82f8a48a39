"""Declared attention under masks of each form: which a class reads as declared, and which it is left to read itself."""

import copy

import pytest
import torch
from torch import nn

import tfm_kernels as tfk

WIDTH = 32
NAMES = {"query": "q", "key": "k", "value": "v", "out": "o", "heads": 4, "mask": "add"}


class EveryHead(nn.Module):
    """Takes a mask of all batches and heads, and no other."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, mask=None):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (self.q(x), self.k(x), self.v(x)))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if mask is not None:
            assert mask.shape == scores.shape
            scores = scores + mask
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_masks_of_every_head_and_of_inference_mode():
    tfk.patching.declare_attention(EveryHead, **NAMES)
    model, x = EveryHead(), torch.randn(2, 5, WIDTH)
    stock = copy.deepcopy(model)
    with torch.inference_mode():
        mask = torch.randn(2, 4, 5, 5)
    report = tfk.patch(model, backend="cpu")
    assert report.replaced[0].note == "fused attention"
    for each in (stock, model):
        each(x, mask).square().sum().backward()
    torch.testing.assert_close(model.q.weight.grad, stock.q.weight.grad)
    assert not report.fallbacks


class FirstHead(EveryHead):
    """Reads the first head's mask for all, which is right where it is the only one."""

    def forward(self, x, mask=None):
        return super().forward(x, None if mask is None else mask[:, :1].expand(-1, 4, *x.shape[1:2] * 2))


def test_masks_that_differ_by_head_are_the_forwards_where_it_reads_one():
    tfk.patching.declare_attention(FirstHead, **NAMES)
    model, x, masks = FirstHead(), torch.randn(2, 5, WIDTH), torch.randn(2, 4, 5, 5)
    stock = copy.deepcopy(model)
    report = tfk.patch(model)
    for number, mask in enumerate((masks[:, :1], masks)):
        torch.testing.assert_close(model(x, mask), stock(x, mask))
        assert len(report.fallbacks) == number


class AnyForm(EveryHead):
    """A mask of three axes is one for each head, batch, or, of two, of keys."""

    axis = None

    def forward(self, x, mask=None):
        batch, length = x.shape[:2]
        if mask is not None and mask.dim() < 4:
            places = {"heads": (None, slice(None)), "batch": (slice(None), None), "keys": (slice(None), None, None)}
            mask = mask[places[self.axis]]
        return super().forward(x, None if mask is None else mask.expand(batch, 4, length, length))


@pytest.mark.parametrize("axis, shape", [("heads", (4, 5, 5)), ("batch", (2, 5, 5)), ("keys", (2, 5))])
def test_masks_of_every_head_beside_those_of_an_axis(axis, shape):
    cls = type("AnyForm", (AnyForm,), {"axis": axis})
    tfk.patching.declare_attention(cls, **NAMES, mask_axis=axis)
    model, x = cls(), torch.randn(2, 5, WIDTH)
    stock = copy.deepcopy(model)
    report = tfk.patch(model)
    for sizes in (shape, (2, 1, 5, 5), (2, 4, 5, 5), (1, 4, 5, 5)):
        mask = torch.randn(sizes)
        torch.testing.assert_close(model(x, mask), stock(x, mask))
    assert not report.fallbacks


def test_a_mask_of_any_sizes_is_exported():
    """Whether it has one for each head is asked of a number that is not known yet."""
    tfk.patching.declare_attention(EveryHead, **NAMES)
    model = EveryHead()
    assert tfk.patch(model).replaced[0].note == "fused attention"
    x, mask, auto = torch.randn(2, 5, WIDTH), torch.randn(2, 4, 5, 5), torch.export.Dim.AUTO
    program = torch.export.export(model, (x, mask), dynamic_shapes=({0: auto, 1: auto}, dict.fromkeys(range(4), auto)))
    torch.testing.assert_close(program.module()(x, mask), model(x, mask))
