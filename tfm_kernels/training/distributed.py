"""One process or many: what torchrun started, and how a model is spread over it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from .objective import Objective

STRATEGIES = ("ddp", "fsdp")


@dataclass(frozen=True)
class Processes:
    """The processes of a run.

    Attributes:
        rank: number of this one; 0 writes files and talks.
        world: how many there are.
        device: of this one.
    """

    rank: int = 0
    world: int = 1
    device: torch.device = torch.device("cpu")

    def total(self, value: Tensor) -> Tensor:
        """The sum of a scalar over all processes."""
        value = value.to(self.device)
        if self.world > 1:
            dist.all_reduce(value)
        return value

    def wait(self) -> None:
        """Returns when every process has called."""
        if self.world > 1:
            dist.barrier()

    def spread(self, objective: Objective, strategy: str) -> nn.Module:
        """The module to call in training: the same one, or in DDP, or with its parameters sharded by FSDP2.

        Args:
            objective: on this process's device, with the same weights everywhere.
            strategy: "ddp" keeps a copy of everything in each process; "fsdp" shards parameters, gradients and
                moments, a layer at a time.

        Raises:
            ValueError: the strategy is neither.
        """
        if strategy not in STRATEGIES:
            raise ValueError(f"spread: strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
        if self.world == 1:
            return objective
        if strategy == "ddp":
            return DistributedDataParallel(objective)
        mesh = dist.device_mesh.init_device_mesh(self.device.type, (self.world,))
        for stack in (module for module in objective.modules() if isinstance(module, nn.ModuleList)):
            for layer in stack:
                fully_shard(layer, mesh=mesh)
        fully_shard(objective, mesh=mesh)  # in place; it is an FSDPModule now
        register_fsdp_forward_method(objective, "scores")
        return objective


@contextmanager
def processes(device: str | None = None) -> Iterator[Processes]:
    """Joins the other processes where torchrun started this one, and leaves them at the end.

    Args:
        device: "cpu" or "cuda"; None is a GPU where there is one. Each process takes the GPU of its local rank.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if not dist.is_torchelastic_launched():
        yield Processes(device=torch.device(kind))
        return
    place = torch.device(kind, dist.get_node_local_rank()) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), place)
    finally:
        dist.destroy_process_group()


def unsynchronised(model: nn.Module, apart: bool):
    """A context for a backward pass whose gradients stay in this process, as long as more are to be added."""
    if isinstance(model, DistributedDataParallel):
        return model.no_sync() if apart else nullcontext()
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(not apart)
    return nullcontext()
