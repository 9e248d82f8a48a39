"""Which backend attention's calls take by their sizes, and that a call like one that was accepted is no other call."""

import pytest
import torch

import tfm_kernels as tfk
from tfm_kernels import _backend, _library

ops = tfk.ops


QUERIES_FROM = [(_library.XEON, 48, 48), (_library.ZEN3, 32, 0), (_library.ZEN4, 8, 8)]


@pytest.mark.parametrize(("nearest", "trains_from", "infers_from"), QUERIES_FROM)
def test_attention_takes_fewer_queries_where_the_library_is_slow(nearest, trains_from, infers_from, monkeypatch):
    monkeypatch.setattr(_library, "nearest", nearest)
    monkeypatch.setattr(_library, "bf16_tiles", False)
    for needs_grad, limit in ((True, trains_from), (False, infers_from)):
        for queries, name in ((limit - 1, "aten"), (limit, "cpu")) if limit else ((1, "cpu"), (2, "cpu")):
            q = torch.ones(1, 2, queries, 8, requires_grad=needs_grad)
            assert f"-> {name}" in tfk.explain("attention", q, q, q)


def test_attention_takes_fewer_queries_in_tiles_of_a_xeon(monkeypatch):
    """In training all with 128 keys and more, where PyTorch's backward is slow."""
    monkeypatch.setattr(_library, "nearest", _library.XEON)
    monkeypatch.setattr(_library, "bf16_tiles", True)
    for needs_grad, queries, keys, name in (
        (False, 47, 47, "aten"), (False, 48, 48, "cpu"), (False, 47, 128, "aten"), (True, 7, 127, "aten"),
        (True, 8, 127, "cpu"), (True, 1, 128, "cpu"),
    ):  # fmt: skip
        q, k = (torch.ones(1, 2, n, 8, dtype=torch.bfloat16, requires_grad=needs_grad) for n in (queries, keys))
        assert f"-> {name}" in tfk.explain("attention", q, k, k), (needs_grad, queries, keys)


@pytest.mark.parametrize(("nearest", "limit"), [(_library.XEON, 1 << 16), (_library.ZEN3, 0), (_library.ZEN4, 0)])
def test_attention_of_one_query_is_chosen_by_what_there_is_to_read(nearest, limit, monkeypatch):
    monkeypatch.setattr(_library, "nearest", nearest)
    for keys, name in ((limit // 16, "cpu"), (limit // 16 - 1, "aten")):
        if keys >= 0:
            q, k = torch.ones(1, 2, 1, 8), torch.ones(1, 2, keys, 8)
            assert f"-> {name}" in tfk.explain("attention", q, k, k)
            assert "-> aten" in tfk.explain("attention", q.requires_grad_(), k, k), "its gradients take tiles"


@pytest.mark.parametrize("nearest", [_library.XEON, _library.ZEN4])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_attention_has_another_limit_for_many_keys_where_vectors_are_long(needs_grad, nearest, monkeypatch):
    monkeypatch.setattr(_library, "nearest", nearest)
    few = "cpu" if nearest == _library.ZEN4 else "aten"
    for queries, keys, name in ((15, 256, "aten"), (15, 255, few), (16, 255, few), (16, 256, "cpu")):
        q, k = (torch.ones(1, 2, length, 8, requires_grad=needs_grad) for length in (queries, keys))
        assert f"-> {name}" in tfk.explain("attention", q, k, k)


def test_attention_trains_fewer_queries_where_the_sequences_have_many_together(monkeypatch):
    monkeypatch.setattr(_library, "nearest", _library.ZEN3)
    for heads, queries, name in ((32, 12, "cpu"), (31, 12, "aten"), (64, 11, "aten"), (8, 32, "cpu")):
        q = torch.ones(1, heads, queries, 8, requires_grad=True)
        assert f"-> {name}" in tfk.explain("attention", q, q, q), (heads, queries)


def attend(q, lengths):
    return ops.attention(q, q, q, tfk.Mask.causal() & tfk.Mask.lengths(lengths), backend="cpu")


def attend_packed(q, lengths):
    """The rows of one head behind one another, in segments of these lengths."""
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    packed = q.transpose(1, 2).flatten(0, 1)
    return ops.attention_varlen(packed, packed, packed, ends, ends, 5, 5, backend="cpu")


@pytest.mark.parametrize("call", [attend, attend_packed])
def test_lengths_are_looked_at_in_every_call(call):
    """They decide what is right, and what of a call is alike holds no values."""
    q = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0))
    expected = {}
    for lengths in ([5, 5], [6, 4], [-1, 5], [5, 6]):
        _backend.Choices.forget()
        try:
            expected[tuple(lengths)] = call(q, torch.tensor(lengths))
        except ValueError as error:
            expected[tuple(lengths)] = str(error)
    assert len({str(e) for e in expected.values()}) == 4 and isinstance(expected[5, 5], torch.Tensor)
    call(q, torch.tensor([5, 5]))
    for lengths, first in expected.items():
        if isinstance(first, str):
            with pytest.raises(ValueError) as again:
                call(q, torch.tensor(lengths))
            assert str(again.value) == first
        else:
            assert torch.equal(call(q, torch.tensor(lengths)), first)


def test_packed_attention_that_was_accepted_is_given_other_segments():
    q = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0))
    attend_packed(q, torch.tensor([5, 5]))
    packed = q.transpose(1, 2).flatten(0, 1)
    ends = torch.tensor([0, 2, 5, 10])
    for backend in ("cpu", "reference", "cpu"):
        out = ops.attention_varlen(packed, packed, packed, ends, ends, 5, 5, backend=backend)
        for i, j in ((0, 2), (2, 5), (5, 10)):
            one = packed[i:j].transpose(0, 1)[None]
            alone = ops.attention(one, one, one, backend="reference")[0].transpose(0, 1)
            torch.testing.assert_close(out[i:j], alone)


SDPA = {
    "plain": ((2, 3, 5, 4), {}),
    "causal": ((2, 3, 5, 4), {"is_causal": True}),
    "keep of three axes": ((2, 3, 5, 4), {"attn_mask": torch.ones(3, 5, 5).tril().bool()}),
    "keep of two axes": ((2, 3, 5, 4), {"attn_mask": torch.ones(5, 5).tril().bool()}),
    "bias": ((2, 3, 5, 4), {"attn_mask": torch.linspace(0, 1, 75).view(1, 3, 5, 5), "scale": 0.3}),
    "three axes": ((3, 5, 4), {"attn_mask": torch.ones(3, 5, 5).tril().bool()}),
    "five axes": ((2, 2, 3, 5, 4), {"is_causal": True}),
}


@pytest.mark.parametrize("name", SDPA)
@pytest.mark.parametrize("autocast", [False, True])
def test_scaled_dot_product_attention_repeats_what_it_did(name, autocast):
    shape, options = SDPA[name]
    q, k, v = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    cast = lambda t: t.bfloat16() if autocast and torch.is_tensor(t) and t.is_floating_point() else t
    given = {name: cast(option) for name, option in options.items()}
    expected = ops.scaled_dot_product_attention(*map(cast, (q, k, v)), backend="cpu", **given)
    _backend.Choices.forget()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        calls = [ops.scaled_dot_product_attention(q, k, v, backend="cpu", **options) for _ in range(3)]
    for out in calls:
        assert out.dtype == expected.dtype and torch.equal(out, expected)
    if not autocast:
        torch.testing.assert_close(expected, torch.nn.functional.scaled_dot_product_attention(q, k, v, **options))


def test_scaled_dot_product_attention_refuses_after_it_accepted():
    q = torch.randn(2, 3, 5, 4)
    for _ in range(2):
        ops.scaled_dot_product_attention(q, q, q)
        for wrong, error in (
            ({"dropout_p": 2.0}, ValueError), ({"is_causal": 1}, TypeError), ({"scale": float("nan")}, ValueError),
            ({"is_causal": True, "attn_mask": torch.ones(5, 5).bool()}, ValueError),
            ({"attn_mask": torch.ones(4, 5).bool()}, ValueError), ({"backend": "triton"}, tfk.BackendError),
        ):  # fmt: skip
            with pytest.raises(error):
                ops.scaled_dot_product_attention(q, q, q, **wrong)
