"""`python -m bench.gpu` on the CUDA kernels, run on the CPU: its parts but for CUDA itself."""

import pytest

from bench.gpu import build, contract, layer_norm, memory, repeats
from bench.gpu.layer_norm import CUDA
from bench.gpu.part import Room, run
from tfm_kernels import _library

SMALL = {name: call for name, call in CUDA.branches("cpu").items() if "x63 " in name or "x1024 " in name}


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    for _, inputs in SMALL.values():
        for name in ("x", "residual"):
            if name in inputs:
                monkeypatch.setitem(inputs, name, inputs[name][:9])


@pytest.mark.parametrize("name", SMALL)
def test_guards_and_repeats(name):
    op, inputs = SMALL[name]
    assert repeats.repeat(op, inputs, "cuda", times=3) == {"repeats": 3}
    assert memory.guarded_call(op, inputs, "cuda") == {}


def test_contract_items(tmp_path):
    room = Room(tmp_path, {}, 0.0, [CUDA], "cpu")
    items = {item.key: item for item in contract.items(room, None)}
    small = [key for key in items if "-17-width=" in key][:3]
    for key in small:
        record = run(items[key])
        assert record["state"] == "green" and 0 < record["C1"] <= 1 and record["op"] in layer_norm.OPS, record
    masks = next(key for key in items if "masks of width 7, p = 0.5" in key)
    assert len(small) == 3 and run(items[masks])["state"] == "green"


def test_the_extension_is_looked_for_again(monkeypatch):
    """The proof's parent began before its build part."""
    built = _library.cuda_extension
    monkeypatch.setattr(_library, "cuda_extension", None)
    found = build.cuda_extension()
    if built is None:
        assert "was not built" in found["why"]
    else:
        assert _library.cuda_extension is built and found["built"] == built.build_info()
