"""Checkpoints that are whole or not there: a folder a step, with safetensors and JSON and no pickle.

``step-00001000/model.safetensors``      the weights, by the names of the state_dict
``step-00001000/optimizer.safetensors``  the optimizer's state, ``<parameter>/<state>``
``step-00001000/state.json``             step, position in the data, loss scale, seed, best validation loss

Random numbers need no state of their own: they follow from seed and step (``seeds``).
"""

from __future__ import annotations

import errno
import json
import shutil
import stat
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from .._durable import write_folder, write_json
from .batches import Position
from .text_file import InputError


@dataclass(frozen=True)
class State:
    """Where a run is.

    Attributes:
        step: updates done.
        position: in the data.
        scaler: of torch.amp.GradScaler.
        seed: of the run.
        best_step: the checkpoint with the least validation loss, None where nothing was validated.
        best_loss: that loss.
    """

    step: int = 0
    position: Position = field(default_factory=Position)
    scaler: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    best_step: int | None = None
    best_loss: float | None = None


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: where they are; made when the first one is saved.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """The steps of all whole checkpoints, in order."""
        names = (path.name.removeprefix("step-") for path in self.folder.glob("step-*") if path.is_dir())
        return sorted(int(name) for name in names if name.isdigit())

    def latest(self) -> State | None:
        """The state of the newest checkpoint, None where there is none."""
        steps = self.steps()
        return self.state(steps[-1]) if steps else None

    def state(self, step: int) -> State:
        """The state that a checkpoint holds.

        Raises:
            InputError: the file is not one that ``save`` wrote.
        """
        path = self.path(step) / "state.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            return State(**{**data, "position": Position(**data["position"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InputError(f"{path} is not the state of a checkpoint ({error})") from error

    def best(self) -> Path:
        """The folder of the checkpoint to use: of the least validation loss, else the newest.

        Raises:
            InputError: there is no checkpoint.
        """
        latest = self.latest()
        if latest is None:
            raise InputError(f"{self.folder} holds no checkpoint")
        return self.path(latest.step if latest.best_step is None else latest.best_step)

    def save(self, state: State, model: nn.Module, optimizer: torch.optim.Optimizer, write: bool = True) -> None:
        """Writes a checkpoint, then removes those that are neither it nor the best.

        Args:
            state: its step names the folder.
            model: not wrapped in DDP; of FSDP2 every process has to call, because the shards are gathered.
            optimizer: of its parameters.
            write: False gathers only, for the processes other than the first.
        """
        weights = _weights(model)
        moments = {f"{name}/{key}": _whole(value) for name, key, value in _moments(model, optimizer)}
        if not write:
            return

        def fill(folder: Path) -> None:
            for name, tensors in (("model", weights), ("optimizer", moments)):
                save_tensors(tensors, folder / f"{name}.safetensors")
            write_json(folder / "state.json", asdict(state))

        write_folder(self.path(state.step), fill)
        for step in self.steps():
            if step not in (state.step, state.best_step):
                shutil.rmtree(self.path(step))

    def load_optimizer(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Gives every parameter its moments; the parameters may be FSDP2's shards.

        Raises:
            InputError: the file cannot be read.
        """
        parameters = dict(model.named_parameters())
        for name, value in load_tensors(self.path(step) / "optimizer.safetensors").items():
            owner, _, key = name.rpartition("/")
            if owner not in parameters:
                raise InputError(f"{self.path(step)} is a checkpoint of another model: it has moments of {owner}")
            optimizer.state[parameters[owner]][key] = _as(value, parameters[owner])


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer):
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            yield name, key, value


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().cpu().contiguous()


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of one storage, such as shared weights, as copies: safetensors keeps no aliases."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        result[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return result


def _as(value: Tensor, parameter: Tensor) -> Tensor:
    """A moment on its parameter's device, sharded as it; a step count is a scalar, which is never sharded."""
    if isinstance(parameter, DTensor) and value.dim() > 0:
        return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
    return value.to(parameter.device)


def save_weights(model: nn.Module, folder: Path) -> None:
    """Writes model.safetensors into a folder, as ``Checkpoints.save`` does."""
    save_tensors(_weights(model), folder / "model.safetensors")


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: _whole(tensor) for name, tensor in model.state_dict().items()}


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes a safetensors file that whoever may read a new file may read; the library's own are for the owner alone.

    Raises:
        OSError: it cannot be written.
    """
    path.touch()
    mode = path.stat().st_mode
    library = safetensors()
    from safetensors import SafetensorError

    try:
        library.save_file(_apart(tensors), path)
    except SafetensorError as error:  # of a full disk, too
        raise OSError(errno.EIO, str(error), str(path)) from error
    path.chmod(stat.S_IMODE(mode))


def load_weights(model: nn.Module, folder: Path) -> None:
    """Puts a checkpoint's weights into a model.

    Args:
        model: of the same configuration.
        folder: of the checkpoint, with model.safetensors.

    Raises:
        InputError: the file cannot be read, or is of another model.
    """
    path = folder / "model.safetensors"
    found, wanted = load_tensors(path), model.state_dict()
    for name in sorted(found.keys() ^ wanted.keys()):
        where = "lacks" if name in wanted else "has, and this one has not,"
        raise InputError(f"{path} is a checkpoint of another model: it {where} {name}")
    for name, tensor in found.items():
        if tensor.shape != wanted[name].shape:
            shapes = f"{tuple(tensor.shape)}, here {tuple(wanted[name].shape)}"
            raise InputError(f"{path} is a checkpoint of another model: {name} is {shapes}")
    model.load_state_dict(found)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, by name.

    Raises:
        InputError: it cannot be read.
    """
    library = safetensors()
    try:
        return library.load_file(path)
    except Exception as error:  # the library raises errors of its own for what is cut off or foreign
        raise InputError(f"{path} cannot be read ({error})") from error


def safetensors() -> Any:
    """The library, or one sentence.

    Raises:
        InputError: it is not installed.
    """
    try:
        from safetensors import torch as library
    except ImportError as error:
        raise InputError("checkpoints need the package safetensors; `pip install safetensors` brings it") from error
    return library
