"""How much memory one run takes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence

import torch


def peak(run: Callable[[], object]) -> int:
    """The most bytes of tensors on the CPU that were alive at once in one run, beyond those that there were before.

    Scratch memory that a library takes past PyTorch's allocator is not in it.
    """
    os.putenv("KINETO_LOG_LEVEL", "99")  # the profiler would tell on stderr that it begins and ends
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Memory block of unknown size.*")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            run()
    level = most = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            level += event.nbytes()
            most = max(most, level)
    return most


def peak_on_gpus(run: Callable[[], object], devices: Sequence[torch.device]) -> int:
    """The most bytes of tensors that were allocated at once on each of the GPUs in one run, beyond those before it."""
    before = []
    for device in devices:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before.append(torch.cuda.memory_allocated(device))
    run()
    return sum(torch.cuda.max_memory_allocated(device) - held for device, held in zip(devices, before, strict=True))
