"""bfloat16 on the CPU, both ways: multiplied as it is stored where the processor can, widened to float32 elsewhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tfm_kernels as tfk
from tfm_kernels import _library
from tfm_kernels.ops import ffn_call

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import torch, tfm_kernels as tfk
from tfm_kernels import _library
assert not _library.cpu_extension.build_info()["{without}"]
draw = lambda *shape: torch.randn(*shape, dtype=torch.bfloat16)
g = torch.manual_seed(3)
call = {call}
tfk.testing.assert_contract(*call, backend="cpu", backward=call[0] != "linear")
print("held")
"""
ATTENTION = (
    '("attention", {"query": draw(2, 4, 67, 32), "key": draw(2, 2, 131, 32), "value": draw(2, 2, 131, 32), '
    '"mask": tfk.Mask.causal(), "dropout_p": 0.2, "seed": torch.tensor(7)})'
)
FFN = (
    '("ffn", {"x": draw(67, 48), "w1": draw(160, 48) / 7, "b1": draw(160), "w2": draw(48, 160) / 13, "b2": None, '
    '"activation": "gelu", "dropout_p": 0.2, "seed": torch.tensor(7)})'
)


FEW_ROWS = FFN.replace("draw(67, 48)", "draw(17, 48)")
LINEAR = '("linear", {"x": draw(17, 48), "weight": draw(160, 48) / 7, "bias": draw(160)})'


@pytest.mark.parametrize(
    "call", (ATTENTION, FFN, FEW_ROWS, LINEAR), ids=("attention", "ffn", "few rows of ffn", "linear")
)
def test_widened_where_the_matrix_library_may_not_use_tiles(call):
    """oneDNN reads ONEDNN_MAX_CPU_ISA: a processor with tiles then behaves as one without."""
    hold_the_contract("AVX512_CORE", "bf16_tiles", call)


SMALL_FFN = (
    '("ffn", {"x": draw({rows}, 1040), "w1": draw(150, 1040) / 32, "b1": draw(150), "w2": draw(99, 150) / 12, '
    '"b2": draw(99), "gate": draw(150, 1040) / 32, "activation": "silu", "dropout_p": 0.2, "seed": torch.tensor(7)})'
)
SMALL_LINEAR = '("linear", {"x": draw({rows}, 1046), "weight": draw(113, 1046) / 32, "bias": draw(113)})'


@pytest.mark.skipif(not _library.bf16_tiles, reason="this processor does not multiply bfloat16 as it is stored")
@pytest.mark.parametrize("rows", (1, 2, 7, 16))
@pytest.mark.parametrize("call", (SMALL_FFN, SMALL_LINEAR), ids=("ffn", "linear"))
def test_few_rows_without_amx(call, rows):
    """AVX512_BF16 alone: up to 16 rows take its dot products, tails of all lengths among them."""
    hold_the_contract("AVX512_CORE_BF16", "amx", call.replace("{rows}", str(rows)))


def hold_the_contract(isa, without, call):
    """The contract of a call in a process whose processor lacks what oneDNN may not use."""
    places = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {"PATH": "/usr/bin:/bin", "ONEDNN_MAX_CPU_ISA": isa, "PYTHONPATH": places}
    code = CODE.replace("{without}", without).replace("{call}", call)
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "held\n", done.stderr


def odd(op):
    """A call whose neighbours do not all pair up, so that it is widened everywhere."""
    draw = lambda *shape: torch.randn(*shape, dtype=torch.bfloat16)
    if op == "attention":
        return {"query": draw(2, 2, 40, 33), "key": draw(2, 2, 50, 33), "value": draw(2, 2, 50, 31)}
    return {"x": draw(40, 33), "w1": draw(65, 33) / 6, "b1": draw(65), "w2": draw(31, 65) / 8, "b2": None}


@pytest.mark.parametrize("op", ("attention", "ffn"))
def test_odd_widths(op):
    torch.manual_seed(1)
    tfk.testing.assert_contract(op, odd(op), backend="cpu")


def ffn_of(dtype, rows, dropout_p, training):
    return ffn_call.Call("cpu", dtype, rows, 384, 1536, 384, "gelu", False, True, dropout_p, training)


@pytest.mark.parametrize("training", (False, True))
@pytest.mark.parametrize("tiles", (False, True))
def test_choice_follows_the_tiles(monkeypatch, tiles, training):
    monkeypatch.setattr(_library, "bf16_tiles", tiles)
    monkeypatch.setattr(_library, "nearest", _library.XEON)
    first = {rows: ffn_call.prefer(ffn_of(torch.bfloat16, rows, 0.0, training))[0] for rows in (1, 64, 512, 8192)}
    assert first[64] == first[8192] == "cpu"
    assert first[1] == ("aten" if training and not tiles else "cpu")
    assert first[512] == ("aten" if tiles and training else "cpu")


@pytest.mark.parametrize("dropout_p", (0.0, 0.1))
@pytest.mark.parametrize("native", (False, True))
def test_choice_follows_the_float16_products(monkeypatch, native, dropout_p):
    monkeypatch.setattr(_library, "f16_products", native)
    first = {
        training: ffn_call.prefer(ffn_of(torch.float16, 512, dropout_p, training))[0] for training in (False, True)
    }
    assert first == {False: "cpu", True: "aten" if native and dropout_p == 0.0 else "cpu"}
