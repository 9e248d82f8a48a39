"""Trains a patched decoder of transformers in two processes and tells of each way to spread it whether it is right.

python -m torch.distributed.run --nproc-per-node 2 -m tests.patching.sharded FAMILY
"""

import inspect
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import tfm_kernels as tfk
from tests.patching.models import decoder

STEPS, LENGTHS = 4, (5, 9, 5, 9)  # both halves have as many tokens
FAMILIES = {"llama": {}, "gemma": {}, "gpt_neox": {"use_parallel_residual": False}}
UNITS = {  # strategy -> ends of the names of the classes that are sharded by themselves
    "fsdp": ("DecoderLayer", "GPTNeoXLayer"),
    "fsdp, parts": ("Attention", "MLP"),
    "fsdp, linears": ("Linear",),
    "fsdp, norms": ("Norm",),
}
STRATEGIES = ("ddp", *UNITS)


def build(family, dtype):
    settings = {"tie_word_embeddings": False, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    return decoder(family, **FAMILIES[family], **settings).to(dtype).train()


def spread(model, strategy):
    """The model in the hands of DDP or FSDP2."""
    if strategy == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in [m for m in model.modules() if type(m).__name__.endswith(UNITS[strategy])]:
        fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def losses(model, alone, steps=STEPS):
    """Of SGD on one batch, whole or each process its half."""
    ids = torch.randint(1, 99, (4, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(9) < torch.tensor(LENGTHS)[:, None]
    here = slice(None) if alone else slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), []
    for _ in range(steps):
        logits = model(input_ids=ids[here], attention_mask=mask[here].long(), use_cache=False).logits
        loss = nn.functional.cross_entropy(logits[mask[here]], ids[here][mask[here]])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if not alone:
            dist.all_reduce(total)
            total /= dist.get_world_size()
        found.append(total.double())
    return torch.stack(found)


def check(strategy, family):
    """Losses of two processes are those of one: to rounding in float64, in float32 as exactly as without us."""
    exact = losses(build(family, torch.float64), alone=True)
    stock = losses(spread(build(family, torch.float32), strategy), alone=False)
    for first in (True, False):
        for dtype in (torch.float64, torch.float32):
            model = build(family, dtype)
            if first:
                report = tfk.patch(model)
            held = spread(model, strategy)
            if not first:
                report = tfk.patch(model)
            assert report.replaced
            error = (losses(held, alone=False) - exact).abs().max()
            floor = 1e-9 if dtype == torch.float64 else 2 * (stock - exact).abs().max() + 1e-6 * exact.max()
            assert error <= floor, f"patched {'first' if first else 'second'}, {dtype}: off by {error:.2e}"
    model = build(family, torch.float64)
    classes = [type(module) for module in model.modules()]
    tfk.patch(model)
    held = spread(model, strategy)
    found = [losses(held, alone=False, steps=1)]
    tfk.unpatch(model)
    bases = [next(b for b in type(m).__bases__ if b is not FSDPModule) if isinstance(m, FSDPModule) else type(m)
             for m in model.modules()]  # fmt: skip
    assert bases == classes, "unpatch left classes of ours"
    run = {inspect.unwrap(type(module).forward).__module__.partition(".")[0] for module in model.modules()}
    assert "tfm_kernels" not in run, "unpatch left forwards of ours"
    found.append(losses(held, alone=False, steps=1))
    assert found[1] < found[0], "it does not go on learning"


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for strategy in STRATEGIES:
        check(strategy, *sys.argv[1:])
        print(strategy, "is right", flush=True)
    dist.destroy_process_group()
