"""Attention's compiled kernels, Triton's and csrc/cuda's: masks, padding, NaN, dropout; wide heads and many tiles."""

import pytest
import torch

from tests import attention_semantics
from tests.attention_semantics import (  # noqa: F401  (some of the tests that every backend has)
    WIDTHS,
    assert_many_tiles,
    assert_wide_heads,
    test_backward_of_another_backend,
    test_batch_and_heads_are_independent_and_padding_is_unread,
    test_dropout_masks_are_those_of_the_other_backends,
    test_nan_where_it_is_seen,
    test_packed_dropout_is_the_padded_calls,
    test_rows_far_from_zero_have_right_gradients,
    test_rows_that_see_nothing,
    test_scores_of_any_size,
    test_segments_are_alone,
    test_the_least_finite_bias_gives_the_mean,
    test_views_give_the_bits_of_contiguous_tensors,
    test_what_lies_beyond_the_last_querys_reach_changes_no_bit,
    test_what_lies_in_padding_changes_no_bit,
    test_who_sees_whom,
)
from tfm_kernels import Mask
from tfm_kernels.testing import assert_contract, run
from tfm_kernels.triton import _launch


def kept_and_dropped(dtype, width, queries=97):
    generator = torch.Generator().manual_seed(width)
    query, key, value = (torch.randn(1, 1, n, width, generator=generator).to(dtype) for n in (queries, 129, 129))
    mask = Mask.keep(torch.rand(1, 1, queries, 129, generator=generator) < 0.7)
    return {"query": query, "key": key, "value": value, "mask": mask, "dropout_p": 0.5, "seed": torch.tensor(5)}


@pytest.mark.parametrize(
    "widths, dtype",
    [
        *((widths, torch.bfloat16) for widths in WIDTHS),
        *(pytest.param(w, torch.float32, marks=() if w == (256, 256) else pytest.mark.slow) for w in WIDTHS),
    ],
    ids=str,
)
def test_wide_heads(widths, dtype, backend):
    assert_wide_heads(widths, dtype, backend)


def test_wrong_lengths_read_nothing_outside(backend, monkeypatch):
    monkeypatch.setattr(attention_semantics, "fenced", torch.clone)  # the machine sees what lies outside
    attention_semantics.test_wrong_lengths_read_nothing_outside(backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_tiles(dtype, backend):
    assert_many_tiles(dtype, backend)


@pytest.mark.parametrize(
    "dtype, width, arch",
    [
        pytest.param(dtype, width, arch, marks=() if arch == quick else pytest.mark.slow)
        for dtype, width, quick in (
            (torch.bfloat16, 64, 90), (torch.bfloat16, 256, 80), (torch.float16, 100, 80), (torch.float32, 64, 90),
        )
        for arch in (80, 90)
    ],
    ids=str,
)  # fmt: skip
def test_keep_with_dropout(dtype, width, arch, gpu):
    """Two causes for Triton to plan the second product's factors by fewer bits than they have."""
    assert_contract("attention", kept_and_dropped(dtype, width), "triton")


def test_keep_with_dropout_of_few_queries(gpu):
    """Tiles of 32 rows, which no warp group multiplies, against 16 keys: an H200 found what these had lost."""
    given = kept_and_dropped(torch.bfloat16, 256, queries=16)
    given["query"] = torch.cat([given["query"], -given["query"]], 1)
    assert_contract("attention", given, "triton", backward=False)
    assert any("few" in name for name in gpu.launches)


@pytest.mark.parametrize(
    "queries, arch", [(97, 90), (5, 80), *(pytest.param(*o, marks=pytest.mark.slow) for o in ((97, 80), (5, 90)))]
)
def test_keep_with_dropout_under_tf32(queries, arch, monkeypatch, gpu):
    """Norms of errors far below 1; TF32, whose factors have 11 bits, is nothing that the contract judges."""
    monkeypatch.setattr(_launch, "float32_products", lambda: "tf32")
    given = kept_and_dropped(torch.float32, 64, queries)
    found, expected = run("attention", given, "triton"), run("attention", given, "reference")
    for name, value in {**expected.outputs, **expected.grads}.items():
        error = ({**found.outputs, **found.grads}[name] - value).norm() / value.norm()
        assert 2**-14 < error < 2**-7, name
