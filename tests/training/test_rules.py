"""Schedules, loss, weight decay and masking against their formulas, written out."""

import math
import platform
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn

from tfm_kernels import training
from tfm_kernels.training import seeds
from tfm_kernels.training.loss import IGNORED, correct, counted
from tfm_kernels.training.optimizer import decayed


@pytest.mark.parametrize("step", [0, 1, 398, 399, 400, 5000])
def test_noam_is_the_formula(step):
    expected = 512**-0.5 * min((step + 1) ** -0.5, (step + 1) * 400**-1.5)
    assert training.noam(step, d_model=512, warmup=400) == pytest.approx(expected, rel=1e-12)
    assert training.schedule("noam", steps=9, warmup=400, d_model=512)(step) == pytest.approx(expected, rel=1e-12)


def test_noam_rises_to_the_warm_up_and_falls_with_the_root():
    rates = [training.noam(step, d_model=64, warmup=10) for step in range(1000)]
    assert rates.index(max(rates)) == 9 and rates[0] == pytest.approx(rates[9] / 10)
    assert rates[39] == pytest.approx(rates[9] / 2)


def test_cosine_and_constant():
    factor = training.schedule("cosine", steps=110, warmup=10, d_model=1)
    assert [factor(step) for step in (0, 9, 10)] == pytest.approx([0.1, 1.0, 1.0])
    assert factor(60) == pytest.approx(0.1 + 0.9 * 0.5) and factor(35) == pytest.approx(
        0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))
    )
    assert factor(110) == factor(500) == pytest.approx(0.1)
    assert [training.schedule("constant", steps=9, warmup=4, d_model=1)(step) for step in (0, 3, 8)] == [0.25, 1, 1]
    assert training.constant(0) == 1.0


def test_schedules_drive_lambda_lr():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(training.constant, warmup=4))
    seen = []
    for _ in range(5):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert seen == [0.5, 1.0, 1.5, 2.0, 2.0]


@pytest.mark.parametrize(("name", "warmup"), [("noam", 0), ("linear", 4)])
def test_a_bad_schedule_is_refused(name, warmup):
    with pytest.raises(ValueError, match="^schedule: (warmup|name) must be .*, got "):
        training.schedule(name, steps=10, warmup=warmup, d_model=8)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_is_the_formula(smoothing):
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 7, dtype=torch.float64)
    targets = torch.tensor([[0, 6, IGNORED], [3, IGNORED, 2]])
    expected = 0.0
    for row, target in zip(logits.flatten(0, 1), targets.flatten().tolist(), strict=True):
        if target != IGNORED:
            probability = row.exp() / row.exp().sum()
            wanted = [smoothing / 7 + (1 - smoothing) * (at == target) for at in range(7)]
            expected -= sum(q * math.log(p) for q, p in zip(wanted, probability.tolist(), strict=True))
    assert training.cross_entropy(logits, targets, smoothing=smoothing).item() == pytest.approx(expected, rel=1e-12)
    assert counted(targets) == 4


def test_loss_of_bf16_logits_is_float32_and_nothing_counted_is_zero():
    logits = torch.randn(1, 4, 9, dtype=torch.bfloat16, requires_grad=True)
    loss = training.cross_entropy(logits, torch.full((1, 4), IGNORED), smoothing=0.1)
    loss.backward()
    assert loss.dtype == torch.float32 and loss == 0.0 and torch.equal(logits.grad, torch.zeros_like(logits))
    assert correct(logits, logits.argmax(-1)) == 4 and correct(logits, torch.full((1, 4), IGNORED)) == 0


def test_weight_decay_is_for_matrices_alone():
    model = nn.ModuleDict({"table": nn.Embedding(5, 4), "norm": nn.LayerNorm(4), "inner": nn.Linear(4, 6)})
    model["out"] = nn.Linear(4, 5)
    model["out"].weight = model["table"].weight
    heavy, light = decayed(model)
    assert [id(p) for p in heavy] == [id(model["inner"].weight)]
    assert len(light) == 5 and len(heavy) + len(light) == len(list(model.parameters()))
    optimizer = training.adamw(model, 0.1, weight_decay=0.5)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]


def test_masking_by_the_rule_of_80_10_10():
    torch.manual_seed(0)
    ids = torch.randint(5, 1000, (200, 500))
    ids[:, ::5] = torch.randint(0, 5, (200, 100))  # special tokens
    inputs, targets = training.mask_tokens(
        ids, vocab_size=1000, mask_id=4, first_ordinary=5, random=seeds.generator(0, "test")
    )
    chosen = targets != IGNORED
    special = ids < 5
    assert not chosen[special].any() and torch.equal(targets[chosen], ids[chosen])
    assert torch.equal(inputs[~chosen], ids[~chosen])
    count = int(chosen.sum())
    sigma = lambda share, of: 4 * math.sqrt(share * (1 - share) / of)  # four standard deviations of a share
    assert abs(count / int((~special).sum()) - 0.15) < sigma(0.15, int((~special).sum()))
    hidden, kept = (inputs == 4) & chosen, (inputs == ids) & chosen
    drawn = chosen & ~hidden & ~kept
    for share, found in ((0.8, hidden), (0.1 + 0.1 / 995, kept), (0.1, drawn)):
        assert abs(int(found.sum()) / count - share) < sigma(share, count) + 0.1 / 995
    assert inputs[drawn].min() >= 5 and inputs[drawn].max() < 1000 and len(inputs[drawn].unique()) > 500


def test_masking_follows_its_seed():
    ids = torch.arange(5, 300)
    one, other, same = (
        training.mask_tokens(ids, vocab_size=300, mask_id=4, first_ordinary=5, random=seeds.generator(seed, "test"))
        for seed in (1, 2, 1)
    )
    assert torch.equal(one[0], same[0]) and not torch.equal(one[1], other[1])


def test_seeds_are_the_same_everywhere():
    assert seeds.derive(0, "step", 1, 0) == 1103592549415215854
    assert len({seeds.derive(0, "step", step, rank) for step in range(100) for rank in range(4)}) == 400


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_freed_memory_is_kept():
    """Of ten fresh 64 MiB tensors, all but the first reuse pages: no new faults (in a process of its own)."""
    script = """
import resource, torch
from tfm_kernels.training.allocator import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(16 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
given_back = faults()
assert keep_freed_memory()
faults()
print(given_back, faults())
"""
    given_back, kept = map(
        int, subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    )
    assert kept < 0.1 * given_back
