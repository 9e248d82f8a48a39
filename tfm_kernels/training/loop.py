"""The training loop of all four tasks; killed at any point it goes on with the bits it would have had."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import metrics as curve
from . import seeds
from .batches import TokenBatches
from .checkpoint import Checkpoints, State, load_weights
from .distributed import Processes, unsynchronised
from .examples import Batch, Examples
from .loss import IGNORED, correct, counted, cross_entropy
from .metrics import Metrics
from .objective import Objective
from .optimizer import adamw
from .precision import autocast, scaler
from .progress import Progress
from .schedule import schedule
from .text_file import InputError


@dataclass(frozen=True)
class TrainingConfig:
    """How a model is trained.

    Attributes:
        steps: updates in all.
        tokens: padded tokens of an update, over all processes and accumulated parts.
        max_examples: of an update, None for no limit.
        accumulation: parts that a process computes one after the other, to need less memory.
        schedule: "noam", "cosine" or "constant".
        learning_rate: that the schedule's factor multiplies; 1 for Noam as the paper has it.
        warmup: updates of growth.
        weight_decay: on weight matrices, not on norms, biases and embeddings.
        betas: of AdamW.
        eps: of AdamW.
        clip: largest norm of the gradient, 0 for no limit.
        smoothing: of the labels.
        precision: "fp32", "bf16" or "fp16".
        strategy: "ddp" or "fsdp", where there are several processes.
        seed: of order, masks and dropout.
        log_every: updates between two lines of metrics.jsonl.
        save_every: updates between two checkpoints; each comes with a validation.
    """

    steps: int = 1000
    tokens: int = 4096
    max_examples: int | None = None
    accumulation: int = 1
    schedule: str = "noam"
    learning_rate: float = 1.0
    warmup: int = 400
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-9
    clip: float = 1.0
    smoothing: float = 0.0
    precision: str = "fp32"
    strategy: str = "ddp"
    seed: int = 0
    log_every: int = 1
    save_every: int = 1000


def train(
    model: nn.Module,
    examples: Examples,
    config: TrainingConfig,
    folder: Path,
    *,
    d_model: int,
    validation: Examples | None = None,
    processes: Processes | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Trains a model to ``config.steps``, from the newest checkpoint in the folder if there is one.

    What is random at a step follows from seed, step and process (torch's generator is seeded anew for each step), and
    the loss of an update is normalised by all its tokens. So a run that was killed and started again writes the same
    losses, bit for bit, as one that was not, and processes or accumulation change them by rounding alone, where no
    dropout is.

    Args:
        model: gives logits (..., V) from an example's inputs; changed in place. Where it can do so, ``Objective``
            takes the loss without them.
        examples: to learn from.
        config: how.
        folder: for metrics.jsonl, loss.png and checkpoints/; made if need be.
        d_model: width of the model, for Noam.
        validation: examples for a loss and an accuracy at every checkpoint, None for none.
        processes: of this run, None for a single one on the model's device.
        progress: whether a bar is shown.

    Returns:
        The last metrics: step, loss, and validation_loss and validation_accuracy where there is validation; None for
        what is not finite, and for the loss of an update without a target.

    Raises:
        InputError: the checkpoint is of another model, or the loss or a weight is no longer finite; then nothing is
            saved, and the checkpoints from before are kept.
    """
    here = processes or Processes(device=next(model.parameters()).device)
    checkpoints = Checkpoints(folder / "checkpoints")
    state = checkpoints.latest() or State(seed=config.seed)
    if state.step:
        load_weights(model, checkpoints.path(state.step))
    objective = Objective(model.to(here.device), smoothing=config.smoothing)
    spread = here.spread(objective, config.strategy)
    optimizer = adamw(model, config.learning_rate, config.weight_decay, config.betas, config.eps)
    scale = scaler(config.precision, here.device)
    if state.step:
        checkpoints.load_optimizer(state.step, model, optimizer)
        scale.load_state_dict(state.scaler)
    factor = schedule(config.schedule, steps=config.steps, warmup=config.warmup, d_model=d_model)
    batches = TokenBatches(examples.lengths, config.tokens, config.seed, max_examples=config.max_examples)

    first = here.rank == 0
    folder.mkdir(parents=True, exist_ok=True)
    metrics = Metrics(folder / "metrics.jsonl", state.step) if first else None
    bar = Progress(config.steps, state.step, progress and first)
    row: dict[str, Any] = {"step": state.step}
    for found in curve.read(folder / "metrics.jsonl"):  # what to return where there is nothing left to do
        row.update({key: found[key] for key in found.keys() - {"seconds"} if found["step"] == state.step})
    begin = time.perf_counter()
    spread.train()
    try:
        for epoch, chosen, position in batches.after(state.position):
            if state.step >= config.steps:
                break
            step = state.step + 1
            torch.manual_seed(seeds.derive(config.seed, "step", step, here.rank))
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate * factor(state.step)
            parts = _parts(examples, chosen, epoch, config.accumulation, here)
            loss, tokens, norm = _update(spread, optimizer, scale, parts, config, here)
            state = replace(state, step=step, position=position, scaler=scale.state_dict())
            words = None
            logged, saved = step % config.log_every == 0, step % config.save_every == 0
            if step == config.steps:
                logged = saved = True
            if logged or saved:
                mean = loss.item() / int(tokens) if tokens else None  # of nothing, as where no token was hidden
                if mean is not None and not math.isfinite(mean):
                    raise InputError(f"the loss is {mean} at step {step}; a lower learning rate may help")
            if saved and not _all_finite(model, here):  # the update of a loss that was a number can overflow
                raise InputError(f"the weights are not finite after step {step}; a lower learning rate may help")
            if logged:
                row = {"step": step, "epoch": epoch, "loss": mean}
                row["gradient_norm"] = float(norm) if torch.isfinite(norm) else None  # fp16 skips such an update
                row.update(learning_rate=optimizer.param_groups[0]["lr"], tokens=int(tokens))
                if metrics:
                    metrics.add({**row, "seconds": round(time.perf_counter() - begin, 3)})
                words = "no target" if mean is None else f"loss {mean:.3f}"
            bar.step(step, words)
            if saved:
                if validation is not None:
                    measured = evaluate(spread, validation, config, here)
                    bar.say(f"step {step:,}: " + ", ".join(f"{key} {value:.4f}" for key, value in measured.items()))
                    least, found = measured["validation_loss"], curve.finite(measured)
                    row = {**row, **found}
                    if metrics:
                        metrics.add({"step": step, **found})
                    if math.isfinite(least) and (state.best_loss is None or least < state.best_loss):
                        state = replace(state, best_step=step, best_loss=least)
                    spread.train()
                if metrics:
                    metrics.sync()
                checkpoints.save(state, model, optimizer, write=first)
    finally:
        bar.close()
        if metrics:
            metrics.close()
    if first:
        curve.draw(curve.read(folder / "metrics.jsonl"), folder / "loss.png")
    here.wait()
    return {**row, "best_step": state.best_step, "best_loss": state.best_loss}


def _all_finite(model: nn.Module, here: Processes) -> bool:
    """Whether no parameter, in any process, holds an infinity or a NaN."""
    own = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    wrong = torch.stack([~torch.isfinite(parameter.detach()).all() for parameter in own]).sum()
    return int(here.total(wrong)) == 0


def _parts(examples: Examples, chosen: list[int], epoch: int, accumulation: int, here: Processes) -> list[Batch]:
    """This process's share of an update, in parts; one that gets no example has another's, with nothing to learn."""
    pieces = accumulation * here.world
    parts = []
    for number in range(here.rank, pieces, here.world):
        mine = chosen[number::pieces]
        inputs, targets = examples.batch(mine or chosen[:1], epoch)
        targets = targets if mine else torch.full_like(targets, IGNORED)
        parts.append((tuple(ids.to(here.device) for ids in inputs), targets))
    return parts


def _update(
    objective: nn.Module,
    optimizer: torch.optim.Optimizer,
    scale: torch.amp.GradScaler,
    parts: list[Batch],
    config: TrainingConfig,
    here: Processes,
) -> tuple[Tensor, Tensor, Tensor]:
    """One update; the loss as a sum over its tokens in all processes, their number, and the gradient's norm."""
    tokens = here.total(torch.stack([counted(targets) for _, targets in parts]).sum())
    weight = here.world / tokens.clamp(min=1)  # processes' gradients are averaged, parts' are added
    total = torch.zeros((), device=here.device)
    for number, (inputs, targets) in enumerate(parts, 1):
        with unsynchronised(objective, number < len(parts)):
            with autocast(config.precision, here.device):
                loss = objective(inputs, targets)
            scale.scale(loss * weight).backward()
        total += loss.detach()
    scale.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(objective.parameters(), config.clip or math.inf)
    scale.step(optimizer)
    scale.update()
    optimizer.zero_grad(set_to_none=True)
    return here.total(total), tokens, norm.full_tensor() if hasattr(norm, "full_tensor") else norm


@torch.no_grad()
def evaluate(
    model: nn.Module, examples: Examples, config: TrainingConfig, here: Processes | None = None
) -> dict[str, float]:
    """Mean loss (nats, without smoothing) and accuracy over all targets of a dataset, as its epoch 0 has them.

    Args:
        model: as ``train`` takes it, or its ``Objective``, spread or not; left in evaluation mode.
        examples: to evaluate.
        config: its tokens and precision are used.
        here: the processes; each computes all of it, because FSDP2's layers need all of them at once.

    Returns:
        {"validation_loss": ..., "validation_accuracy": ...}; NaN where there is no target.
    """
    device = here.device if here else next(model.parameters()).device
    model.eval()
    inner = getattr(model, "module", model)  # DDP's forward is for training
    objective = inner if isinstance(inner, Objective) else Objective(inner)
    sums = torch.zeros(3, dtype=torch.float64)
    limit = max(config.tokens, max(examples.lengths))
    for chosen in TokenBatches(examples.lengths, limit, 0, shuffle=False).epoch(0):
        inputs, targets = examples.batch(chosen, 0)
        with autocast(config.precision, device):
            logits, targets = objective.scores(tuple(ids.to(device) for ids in inputs), targets)
        found = cross_entropy(logits, targets), correct(logits, targets), counted(targets)
        sums += torch.stack([value.cpu().double() for value in found])
    loss, right, count = sums.tolist()
    count = count or math.nan  # a mean over nothing is no number
    return {"validation_loss": loss / count, "validation_accuracy": right / count}


def as_dict(config: TrainingConfig) -> dict[str, Any]:
    """The configuration as JSON has it."""
    return {**asdict(config), "betas": list(config.betas)}
