"""`python -m bench.gpu` on interpreted kernels: what its parts do to the ops' calls, but for CUDA itself."""

import pytest
import torch

from bench.gpu import contract, ffn, layer_norm, memory, repeats
from bench.gpu.layer_norm import TRITON
from bench.gpu.part import Room, run
from tfm_kernels import ops

SMALL = {name: call for name, call in TRITON.branches("cpu").items() if "x63 " in name or "x64 " in name}


BLOCKS = {name: call for name, call in ffn.TRITON.branches("cpu").items() if " 70 " in name and "bfloat16" in name}


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """The interpreter is slow, and needs no GPU's worth of rows."""
    for _, inputs in SMALL.values():
        for name in ("x", "residual"):
            if name in inputs:
                monkeypatch.setitem(inputs, name, inputs[name][:9])


@pytest.mark.parametrize("name", SMALL)
def test_guards_and_repeats(name):
    op, inputs = SMALL[name]
    assert repeats.repeat(op, inputs, "triton", times=3) == {"repeats": 3}
    assert memory.guarded_call(op, inputs, "triton") == {}


@pytest.mark.parametrize("name", BLOCKS)
def test_guards_and_repeats_of_ffn(name):
    op, inputs = BLOCKS[name]
    assert repeats.repeat(op, inputs, "triton", times=2) == {"repeats": 2}
    assert memory.guarded_call(op, inputs, "triton") == {}


def test_a_write_beside_a_tensor_is_seen(monkeypatch):
    right = ops.rms_norm

    def past_the_end(x, weight, backend):
        x.untyped_storage()[memory.GUARD + x.numel() * x.element_size()] = 1
        return right(x, weight, backend=backend)

    monkeypatch.setattr(ops, "rms_norm", past_the_end)
    x, weight = torch.randn(3, 24), torch.randn(24)
    with memory.guards(0xFF) as guard:
        guard(x)
    with pytest.raises(AssertionError, match="was written to"):
        with memory.guards(0xFF) as guard:
            ops.rms_norm(guard(x), guard(weight), "triton")


def test_a_read_beside_a_tensor_is_seen(monkeypatch):
    right = ops.rms_norm

    def too_far(x, weight, backend):
        wide = x.detach().as_strided((1,), (1,), x.storage_offset() + x.numel()) if x.storage_offset() else 0.0
        return right(x, weight, backend=backend) + wide

    monkeypatch.setattr(ops, "rms_norm", too_far)
    with pytest.raises(AssertionError, match="what lies beside"):
        memory.guarded_call("rms_norm", {"x": torch.randn(3, 24), "weight": torch.randn(24)}, "triton")


def test_contract_items_of_ffn(tmp_path):
    room = Room(tmp_path, {}, 0.0, [ffn.TRITON], "cpu")
    items = {item.key: item for item in contract.items(room, None)}
    masks = next(key for key in items if "masks of 7 features, p = 0.5" in key)
    small = next(key for key in items if "-70-e=16-f=24-" in key)
    assert run(items[masks])["state"] == "green" and 0 < run(items[small])["C1"] <= 1


def test_contract_items(tmp_path):
    room = Room(tmp_path, {}, 0.0, [TRITON], "cpu")
    items = {item.key: item for item in contract.items(room, None)}
    small = [key for key in items if "-17-width=" in key][:3]
    for key in small:
        record = run(items[key])
        assert record["state"] == "green" and 0 < record["C1"] <= 1 and record["op"] in layer_norm.OPS, record
    masks = next(key for key in items if "masks of width 7, p = 0.5" in key)
    assert len(small) == 3 and run(items[masks])["state"] == "green"
