"""No byte outside of a tensor is touched, and offsets beyond 2**31 elements arrive."""

from contextlib import nullcontext

import pytest
import torch

from tests.attention_memory import (
    ANYWHERE,
    BIASES,
    FAR,
    SIZES,
    apart,
    assert_no_byte_outside,
    assert_no_byte_outside_of_packed_tensors,
    both_of,
    randn,
    two_sequences,
)
from tests.fences import fenced, huge
from tests.interpreter.few_queries import taken
from tfm_kernels.ops.attention import _forward
from tfm_kernels.triton import _attention_call


def between_fences(monkeypatch, call):
    """Runs ``call`` where every new tensor ends at a protected page."""
    empty, zeros = torch.empty, torch.zeros
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: fenced(empty(*args, **kwargs)))
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: fenced(zeros(*args, **kwargs)))
    found = call()
    monkeypatch.undo()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("bias_shape", BIASES)
def test_no_byte_outside(bias_shape, sizes, dtype, monkeypatch):
    assert_no_byte_outside("triton", bias_shape, sizes, dtype, lambda call: between_fences(monkeypatch, call))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(1, 200, 24, 8), (9, 130, 7, 40), (33, 66, 200, 8)], ids=str)
def test_no_byte_outside_with_few_queries(sizes, dtype, monkeypatch):
    """What the parts of the keys leave behind lies between fences, too."""
    with taken() as launches:
        assert_no_byte_outside("triton", "bhqk", sizes, dtype, lambda call: between_fences(monkeypatch, call))
    assert max(config.parts for name, config, _ in launches if name == "attention_fwd_few_kernel") > 1


def test_no_byte_outside_of_packed_tensors(monkeypatch):
    assert_no_byte_outside_of_packed_tensors("triton", lambda call: between_fences(monkeypatch, call))


def test_no_byte_outside_of_packed_tensors_with_few_queries(monkeypatch):
    with taken() as launches:
        assert_no_byte_outside_of_packed_tensors("triton", lambda call: between_fences(monkeypatch, call))
    assert "attention_fwd_merge_kernel" in {name for name, _, _ in launches}


@pytest.fixture(scope="module")
def space():
    """Room for a tensor of more than 2**31 elements, taken up only where it is written."""
    return huge(FAR + 2**17, torch.float16)


NAMES = ("query", "key", "value", "bias", "keep", "dout", "dq", "dk", "dv", "out")


FORWARD = ("query", "key", "value", "bias", "keep", "out")


@pytest.mark.parametrize("name, way", [*((name, nullcontext) for name in NAMES), *((name, taken) for name in FORWARD)])
def test_sequences_far_apart(name, way, space, monkeypatch):
    """Each argument and result in turn has more than 2**31 elements between its two sequences."""
    given = two_sequences()

    def run():
        with way():
            return both_of("triton", given)

    expected = run()
    if name in given:
        given[name] = apart(space, given[name])
    else:
        like, place = (
            _attention_call.Call.like,
            {"out": ("fwd", 0), "dq": ("bwd", 0), "dk": ("bwd", 1), "dv": ("bwd", 2)},
        )
        made = []

        def far_like(call, t, width, dtype=None):
            found = like(call, t, width, dtype)
            made.append(call.op)
            here = made.count(call.op) - 1
            return apart(space, found) if (call.op[10:13], here) == place[name] else found

        monkeypatch.setattr(_attention_call.Call, "like", far_like)
    for a, b in zip(run(), expected, strict=True):
        assert torch.equal(a, b)


def assert_far_launches_agree(monkeypatch, given, expected, change, names):
    """Launches the kernels over pairs of tiles with what ``change(arguments)`` gives, which are ``names`` in all."""
    launch, met = _attention_call.Call.launch, set()

    def far(call, kernel, programs, config, **more):
        changed = change(more)
        launch(call, kernel, programs, config, **more | changed)
        met.update(name for name in changed if name in kernel.arg_names)
        for name, t in changed.items():
            if isinstance(t, torch.Tensor) and t.shape == more[name].shape:
                more[name].copy_(t)  # what was written there comes back

    monkeypatch.setattr(_attention_call.Call, "launch", far)
    for a, b in zip(both_of("triton", given), expected, strict=True):
        assert torch.equal(a, b)
    assert met == names


def test_numbers_of_rows_far_apart(monkeypatch):
    """lse, dlse and the backward's own numbers, of which a row has eight."""
    given = two_sequences() | {"dlse": torch.arange(36.0).view(2, 2, 9) / 36}
    expected = both_of("triton", given)
    steps = {"lse_ptr": FAR, "dlse_ptr": FAR, "statistics_ptr": 8 * FAR}
    spaces = {name: huge(step + 2**17, torch.float32) for name, step in steps.items()}

    def change(more):
        there = [name for name in steps if more.get(name) is not None]
        return {"lse_stride_b": FAR} | {name: apart(spaces[name], more[name], steps[name]) for name in there}

    assert_far_launches_agree(monkeypatch, given, expected, change, {"lse_stride_b", *steps})


def test_parts_far_apart(monkeypatch):
    """The sums that the parts of the keys leave behind, and the two numbers of a row beside them."""
    q, k, v = (randn(2, 2, length, 16, dtype=torch.float16, seed=length + n) for n, length in enumerate((9, 150, 150)))
    options = (None, None, None, None, None, 9, 150, ANYWHERE, 0.3, 0.0, None, True)
    spaces = {"parts_ptr": huge(3 * 16 * FAR, torch.float32), "numbers_ptr": huge(3 * 2 * FAR, torch.float32)}
    with taken() as launches:
        expected = [t.clone() for t in _forward["triton"](q, k, v, *options)]
        launch = _attention_call.Call.launch

        def far(call, kernel, programs, config, **more):
            assert config.parts == 3 and set(spaces) <= set(more)
            launch(call, kernel, programs, config, **more | spaces | {"part_step": FAR})

        monkeypatch.setattr(_attention_call.Call, "launch", far)
        found = _forward["triton"](q, k, v, *options)
        monkeypatch.setattr(_attention_call.Call, "launch", launch)
    assert len(launches) == 4 and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_gradients_of_a_bias_far_apart(space, monkeypatch):
    given = two_sequences()
    expected = both_of("triton", given)

    def change(more):
        if more.get("dbias_ptr") is None:
            return {}
        return {"dbias_ptr": apart(space, more["dbias_ptr"]), "dbias_stride_b": FAR}

    assert_far_launches_agree(monkeypatch, given, expected, change, {"dbias_ptr", "dbias_stride_b"})


@pytest.mark.parametrize("kind", ["per pair", "per key", "per query", "per head"])
def test_sums_of_a_broadcast_bias_far_apart(kind, monkeypatch):
    """The matrices of partial sums; one stands for both heads, in parts or not."""
    given = two_sequences()
    given["bias"] = {
        "per pair": given["bias"][:, :1], "per key": given["bias"][:, :, :1], "per query": given["bias"][..., :1],
        "per head": given["bias"][:, :, :1, :1],
    }[kind].contiguous()  # fmt: skip
    expected = both_of("triton", given)
    space = huge(4 * FAR, torch.float32)

    def change(more):
        if "sums_ptr" not in more:
            return {}
        sums = more["sums_ptr"]
        rows = FAR // more["COLUMNS"]
        step = rows * more["COLUMNS"]
        assert step >= 2**31
        parts, sequences, heads = sums.shape[:3]
        assert parts * sequences * heads <= 4
        strides = (sequences * heads * step, heads * step, step, sums.stride(3), 1)
        return {"sums_ptr": space.as_strided(sums.shape, strides), "ROWS": rows}

    assert_far_launches_agree(monkeypatch, given, expected, change, {"sums_ptr", "ROWS"})


@pytest.mark.parametrize("far", ["lists", "rows of tiles"])
def test_lists_of_tiles_far_apart(far, monkeypatch):
    """The list of a row of tiles, which is made by one kernel and read by others, and a sequence's rows of tiles."""
    given = two_sequences()
    expected = both_of("triton", given)
    tiles, counts = huge(2 * FAR + 2**17, torch.int32), huge(FAR + 2**17, torch.int32)
    make = _attention_call.keep_tiles_kernel

    class Making:
        def __getitem__(self, grid):
            return lambda **arguments: make[grid](**arguments | {"tiles_ptr": tiles, "list_width": FAR})

    def change(more):
        if more.get("tiles_ptr") is None:
            return {}
        if far == "lists":
            return {"tiles_ptr": tiles, "list_width": FAR}
        width = more["list_width"]
        assert more["list_stride_b"] == 1 and width <= 2
        return {
            "list_stride_b": FAR, "counts_ptr": apart(counts, more["counts_ptr"].view(2, 1)),
            "tiles_ptr": apart(tiles, more["tiles_ptr"].view(2, width), FAR * width),
        }  # fmt: skip

    if far == "lists":
        monkeypatch.setattr(_attention_call, "keep_tiles_kernel", Making())
    names = {"tiles_ptr", "list_width"} if far == "lists" else {"counts_ptr", "tiles_ptr", "list_stride_b"}
    assert_far_launches_agree(monkeypatch, given, expected, change, names)
