"""csrc/cuda as nvcc compiles it, held to the numeric contract."""

import pytest
import torch

import tfm_kernels as tfk
from tests.ffn_semantics import block
from tests.layer_norm_semantics import calls, randn
from tests.ptx.chosen import NORMS, assert_every_level, assert_held, marked_cases
from tests.ptx.test_machine import attention_step, removed
from tfm_kernels.testing import assert_contract

FAMILIES = (NORMS, ("attention",), ("attention_varlen",), ("ffn",))
CASES = [case for ops in FAMILIES for case in marked_cases(ops)]


@pytest.mark.parametrize("case", CASES)
def test_contract(case, cuda):
    assert_held(case, "cuda", cuda.machine)


def test_cases_have_every_level():
    for ops in FAMILIES:
        assert_every_level(marked_cases(ops), at_most=30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows, width", [(37, 40), (5, 509), (5, 513), (7, 1024), (3, 1025), (3, 8192), (3, 8193)])
def test_every_launch_of_the_norms(rows, width, dtype, cuda):
    """Either side of where pick() changes, rows that start at whole packs and rows that do not, more than blocks."""
    for op, inputs in calls(width, dtype, rows):
        assert_contract(op, inputs, "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cut_sums(dtype, cuda):
    """Weights' gradients in parts of k, and sums over rows in runs."""
    cuda.begin(multiprocessors=3)
    assert_contract("ffn", block(1300, 8, 24, 10, dtype, gated=True), "cuda")
    launches = cuda.machine.launches
    sums = 3 + 1 + 2 + 2  # of each: three weights, db1, the gate's bias and db2 in runs
    assert launches.count("sum_rows_kernel") == launches.count("ffn_fwd_kernel") * sums


def norm_step(backend):
    x, weight, bias = (randn(*size, seed=len(size)).requires_grad_() for size in ((40, 72), (72,), (72,)))
    y = tfk.ops.layer_norm(x, weight, bias, backend=backend)
    return [y, *torch.autograd.grad(y.square().sum(), [x, weight, bias])]


def ffn_step(backend):
    x, w1, w2 = (randn(*size, seed=size[0]).bfloat16().requires_grad_() for size in ((150, 72), (136, 72), (72, 136)))
    y = tfk.ops.ffn(x, w1, None, w2, None, backend=backend)
    return [y, *torch.autograd.grad(y.float().square().sum(), [x, w1, w2])]


def seen_without(cuda, step, word):
    """Kernel -> of each line that begins with ``word``, whether the step shows that it is left out."""
    cuda.begin(multiprocessors=5)
    texts, found = {}, {}
    cuda.text = lambda name, text: texts.setdefault(name, text)
    expected = step("cuda")
    for name, text in texts.items():
        for changed in removed(text, word):
            cuda.text = lambda other, text, name=name, changed=changed: changed if other == name else text
            try:
                shows = not all(map(torch.equal, step("cuda"), expected))
            except RuntimeError:
                shows = True
            found.setdefault(name, []).append(shows)
    return found


def test_what_is_left_out_of_the_norms_shows(cuda):
    """A fence, or a barrier (some stand twice) among the blocks that add up dweight and dbias."""
    (fences,), (barriers,) = (seen_without(cuda, norm_step, word).values() for word in ("membar", "bar.sync"))
    assert len(fences) == 4 and all(fences)
    assert len(barriers) >= 8 and sum(barriers) >= len(barriers) / 2


@pytest.mark.parametrize("step, kernels", [(ffn_step, 5), (attention_step, 3)])
@pytest.mark.parametrize("word, seen", [("cp.async.wait_group", any), ("bar.sync", any), ("bar.warp.sync", all)])
def test_what_is_left_out_of_products_shows(word, seen, step, kernels, cuda):
    """A wait for copies, barriers of a block (of each kernel some stand on ways not taken here), lanes that wait."""
    found = {name: lines for name, lines in seen_without(cuda, step, word).items() if "_rows_" not in name}
    assert len(found) == kernels and all(seen(lines) for lines in found.values()), found
