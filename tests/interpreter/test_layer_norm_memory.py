"""No byte outside of a tensor is touched, and offsets beyond 2**31 elements arrive."""

import pytest
import torch

from tests.fences import fenced, huge
from tests.interpreter.one_program import run_program
from tfm_kernels.ops.layer_norm import BWD, FWD
from tfm_kernels.triton import _launch, _layer_norm_sums, layer_norm_bwd, layer_norm_fwd

SEED = torch.tensor(77)
FAR = 2**31 + 4096  # elements between two rows


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_n", [None, 64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (5, 200), (17, 72)], ids=str)
def test_no_byte_outside(shape, block_n, dtype, monkeypatch):
    """Every argument and every result ends at a protected page."""
    if block_n is not None:  # walks of long rows
        forward, backward = layer_norm_fwd.Config(1, 64, 1, None), layer_norm_bwd.Config(1, 64, 1, 2, 3, None, False)
        sums = _layer_norm_sums.Config(2, 64, 1, 1, 3, 128)
        monkeypatch.setattr(layer_norm_fwd, "pick_config", lambda *_: forward)
        monkeypatch.setattr(layer_norm_bwd, "pick_config", lambda *_: backward)
        monkeypatch.setattr(_layer_norm_sums, "pick_config", lambda *_: sums)
    empty, zeros = torch.empty, torch.zeros
    rows, width = shape
    x, residual, dy, dz = (fenced(randn(*shape, dtype=dtype, seed=seed)) for seed in range(4))
    weight, bias = (fenced(randn(width, dtype=dtype, seed=seed)) for seed in (4, 5))
    seed, numbers = fenced(SEED), fenced(torch.arange(rows) * 3)

    def run(backend):
        y, z, mean, rstd = FWD[backend](x, residual, weight, bias, 1e-5, 1e-3, False, False, 0.4, seed, numbers)
        options = (1e-3, False, False, 0.4, seed, numbers, True, True)
        return y, z, *BWD[backend](dy, dz, z, mean, rstd, weight, bias, *options)

    expected = run("cpu")
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: fenced(empty(*args, **kwargs)))
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: fenced(zeros(*args, **kwargs)))
    found = run("triton")
    monkeypatch.undo()
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 16 * torch.finfo(dtype).eps}
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.fixture(scope="module")
def spaces():
    """Room for two tensors of more than 2**31 elements, taken up only where it is written."""
    return [huge(FAR + 2**17, torch.float16) for _ in range(2)]


@pytest.fixture
def space(spaces):
    return spaces[0]


def apart(space, t):
    """``t``, two rows, laid so that they are FAR elements from one another."""
    rows = space.as_strided((2, t.shape[1]), (FAR, 1))
    return rows.copy_(t)


@pytest.mark.parametrize("width", [96, 16400])  # long rows have a launch for their sums over rows
def test_arguments_with_far_rows(space, width):
    x, residual, dy, dz = (randn(2, width, dtype=torch.float16, seed=seed) for seed in range(4))
    weight = randn(width, seed=4)

    def forward(x, residual):
        return FWD["triton"](x, residual, weight, None, 1e-5, 1e-3, False, False, 0.4, SEED, None)

    y, z, mean, rstd = forward(x, residual)
    for a, b in zip(forward(apart(space, x), residual), (y, z, mean, rstd), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(forward(x, apart(space, residual)), (y, z, mean, rstd), strict=True):
        assert torch.equal(a, b)

    def backward(dy, dz, z):
        return BWD["triton"](dy, dz, z, mean, rstd, weight, None, 1e-3, False, False, 0.4, SEED, None, True, True)

    expected = backward(dy, dz, z)
    for name in range(3):
        given = [apart(space, t) if index == name else t for index, t in enumerate((dy, dz, z))]
        for a, b in zip(backward(*given), expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("width", [32768, 65536])
@pytest.mark.parametrize("walked", [False, True])
def test_results_with_far_rows(spaces, width, walked, monkeypatch):
    """The last program of a call whose results have more than 2**31 elements."""
    rows = FAR // width + 1
    assert (rows - 1) * width >= 2**31
    x, residual, weight = (randn(1, width, dtype=torch.float16, seed=seed) for seed in range(3))
    common = {"M": rows, "N": width, "scale": 2.0, "last_dropped": 0, "divisor": float(width), "seed_ptr": SEED}
    common |= {
        "eps_outside": 1e-3,
        "BLOCK_M": 1,
        "BLOCK_N": 8192 if walked else width,
        "ALIGNED": True,
        "weight_ptr": weight[0],
    }
    numbers = torch.tensor([rows - 1])
    y, z, _, rstd = FWD["cpu"](x, residual, weight[0], None, 1e-5, 1e-3, True, False, 0.5, SEED, numbers)
    found_rstd = torch.zeros(rows)
    run_program(
        monkeypatch,
        layer_norm_fwd.layer_norm_fwd_walk_kernel if walked else layer_norm_fwd.layer_norm_fwd_kernel,
        rows - 1, x_ptr=x, residual_ptr=residual, x_stride_m=0, residual_stride_m=0, eps=1e-5,
        y_ptr=spaces[0], z_ptr=spaces[1], rstd_ptr=found_rstd, **common,
    )  # fmt: skip
    last = slice((rows - 1) * width, rows * width)
    torch.testing.assert_close(found_rstd[-1:], rstd, rtol=1e-6, atol=0)
    torch.testing.assert_close(spaces[0][last], y[0], rtol=2e-3, atol=2e-3)
    assert torch.equal(spaces[1][last], z[0])

    dx, dresidual, _, _ = BWD["cpu"](
        x, None, z, rstd[:0], rstd, weight[0], None, 1e-3, True, False, 0.5, SEED, numbers, False, False
    )
    run_program(
        monkeypatch,
        layer_norm_bwd.layer_norm_bwd_walk_kernel if walked else layer_norm_bwd.layer_norm_bwd_kernel,
        rows - 1, dy_ptr=x, z_ptr=z, dy_stride_m=0, z_stride_m=0, dz_stride_m=0, rstd_ptr=found_rstd,
        dx_ptr=spaces[0], dresidual_ptr=spaces[1], STAGES=1, **common,
    )  # fmt: skip
    torch.testing.assert_close(spaces[0][last], dx[0], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(spaces[1][last], dresidual[0], rtol=2e-3, atol=2e-3)


def test_numbers_of_far_rows(monkeypatch):
    """The last rows of more than 2**31, of which there is a number each: mean, rstd, and the one that dropout reads.

    The rows are short: no memory holds so many of those that are walked.
    """
    block, width = 4, 16
    scale, last_dropped = _launch.check_dropout("layer_norm", 0.4, SEED)
    x, residual, dy = (randn(1, width, dtype=torch.float16, seed=seed) for seed in range(3))
    common = {"N": width, "scale": scale, "last_dropped": last_dropped, "divisor": float(width), "seed_ptr": SEED}
    common |= {"BLOCK_M": block, "BLOCK_N": width, "ALIGNED": True, "eps_outside": 1e-3}

    def last_rows(rows):
        """What the last ``block`` of ``rows`` rows get: all of them see the same x, residual and dy."""
        wide = {name: huge(rows * width, torch.float16) for name in ("y_ptr", "z_ptr", "dx_ptr", "dresidual_ptr")}
        numbers = {name: huge(rows, torch.float32) for name in ("mean_ptr", "rstd_ptr")}
        of_dropout = huge(rows, torch.int64)
        of_dropout[-block:] = torch.arange(block) * 5 + 3
        given = common | numbers | {"M": rows, "rows_ptr": of_dropout}
        y, z = wide.pop("y_ptr"), wide.pop("z_ptr")
        run_program(
            monkeypatch, layer_norm_fwd.layer_norm_fwd_kernel, rows // block - 1, x_ptr=x, residual_ptr=residual,
            x_stride_m=0, residual_stride_m=0, eps=1e-5, y_ptr=y, z_ptr=z, **given,
        )  # fmt: skip
        run_program(
            monkeypatch, layer_norm_bwd.layer_norm_bwd_kernel, rows // block - 1, dy_ptr=dy, z_ptr=z, dy_stride_m=0,
            z_stride_m=width, dz_stride_m=0, STAGES=1, **given, **wide,
        )  # fmt: skip
        return [t[-block * width :].clone() for t in (y, z, *wide.values())] + [
            t[-block:].clone() for t in numbers.values()
        ]

    expected = last_rows(block)
    assert all(t.abs().max() > 0 for t in expected)
    for a, b in zip(last_rows(FAR), expected, strict=True):
        assert torch.equal(a, b)
