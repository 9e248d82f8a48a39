"""tune(): measures on this machine which backend runs your calls fastest; automatic choice goes by it from then on."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import _backend, _check, _measured, interleaved

SECONDS = 0.5  # of each bucket
ROUNDS = 200
LEAST = interleaved.LEAST
GAIN = 0.98  # another backend has to take this part of the time of the one that is preferred unmeasured


Calls = dict[tuple[str, str], tuple[_backend.Op, Any]]  # device and bucket -> one call of it


@dataclass(frozen=True)
class Row:
    """What was measured for calls of one bucket.

    Attributes:
        call: op and bucket, "layer_norm float32 rows=4096 features=768".
        device: "cpu" or "cuda".
        seconds: backend -> median seconds of one call, with its backward where the call is trained.
        chosen: what automatic choice takes from now on.
        before: what it took.
    """

    call: str
    device: str
    seconds: Mapping[str, float]
    chosen: str
    before: str


@dataclass
class TuneReport:
    """What tune() found.

    Attributes:
        rows: one for each bucket of calls that more than one backend can run.
        alone: buckets that one backend alone can run: nothing to measure.
        file: where the choices are kept, None where they could not be.
        problem: why they could not be, or "".
    """

    rows: list[Row] = field(default_factory=list)
    alone: dict[str, str] = field(default_factory=dict)
    file: Path | None = None
    problem: str = ""

    @property
    def changed(self) -> list[Row]:
        """The rows whose choice is another one now."""
        return [row for row in self.rows if row.chosen != row.before]

    def table(self) -> str:
        """One line a bucket: the time of each backend in us, the chosen one marked with a star."""
        lines = []
        for row in self.rows:
            words = (f"{'*' * (b == row.chosen)}{b} {s * 1e6:.0f} us" for b, s in row.seconds.items())
            now = "" if row.chosen == row.before else f", before {row.before}"
            lines.append(f"{row.call}\n    {', '.join(words)}{now}")
        lines += [f"{call}\n    {backend} alone can run it" for call, backend in self.alone.items()]
        lines.append(f"{len(self.rows)} measured, {len(self.changed)} with another choice than before")
        if self.file is not None:
            lines.append(f"kept in {self.file}")
        elif self.problem:
            lines.append(f"not kept beyond this process: {self.problem}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """The whole report."""
        return json.dumps({**asdict(self), "file": self.file and str(self.file)}, indent=2)


def tune(
    model_or_op: nn.Module | str, inputs: Any, *, progress: Callable[[str, int, int], None] | None = None
) -> TuneReport:
    """Measures which backend is fastest for the calls that a model makes, and chooses it for calls like these.

    Every call of ``tfm_kernels.ops`` that the model makes and leaves to automatic choice is repeated on random tensors
    of its shapes, dtypes and mask, by each backend that can run it, in turns; with its backward where autograd records
    it. The fastest is kept in a table, and automatic choice goes by it, in this process at once and in later ones: for
    calls of the same op, dtype, options and widths, on this kind of device with as many threads and the same versions
    of torch and tfm_kernels, whose numbers of rows, sequences, queries and keys round to the same powers of two. What
    is not in the table is chosen as before. Compiled graphs do not look at it, since they must not depend on lengths.

    Args:
        model_or_op: a model with fused layers (of ``tfm_kernels.nn``, or patched), which is run once under the present
            grad mode; its buffers and torch's random numbers are as before afterwards. Or the name of a function of
            ``tfm_kernels.ops``, such as "attention".
        inputs: what to call it with: a tensor, a tuple of arguments, or a dict of arguments by name.
        progress: called before each measurement with its name, its number from 0 and how many there are.

    Returns:
        A report: ``rows``, ``changed``, ``table()``, ``to_json()``.

    Raises:
        TypeError: model_or_op or inputs are of the wrong kind, or an argument of the op is.
        ValueError: no op has this name; an argument of it is wrong; automatic choice has nothing to decide, because
            the model calls no op, each call names its backend, or use_backend() does.

    Cost: half a second for each bucket of calls. The table is a JSON file in the user's cache folder
        (~/.cache/tfm_kernels/tuned.json); ``python -m tfm_kernels tune --forget`` deletes it.

    Example:
        >>> model = tfk.nn.TransformerEncoderLayer(8, 2, 32, batch_first=True).eval()
        >>> with torch.no_grad():
        ...     print(tune(model, torch.randn(2, 5, 8)).table())
        attention float32 sequences=2 ...
            ...
        3 measured, ...
    """
    if _backend.forced() is not None:
        raise ValueError(f"tune: use_backend({_backend.forced()!r}) leaves nothing to choose; call tune() outside it")
    args, kwargs = _check.call_arguments("tune", inputs)
    if not isinstance(model_or_op, (nn.Module, str)):
        raise TypeError(
            f"tune: model_or_op must be a torch.nn.Module or the name of an op, got {type(model_or_op).__name__}"
        )
    report = TuneReport()
    with torch.random.fork_rng():
        if isinstance(model_or_op, str):
            calls = _call_of(model_or_op, args, kwargs)
        else:
            calls = _calls_of(model_or_op, args, kwargs)
        for number, ((device, bucket), (op, call)) in enumerate(calls.items()):
            if progress is not None:
                progress(bucket, number, len(calls))
            rivals = _rivals(op, call)
            if len(rivals) == 1:
                report.alone[bucket] = rivals[0]
            elif rivals:
                report.rows.append(_measure(op, call, rivals, device, bucket))
    _keep(report)
    return report


def _calls_of(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Calls:
    """The calls that the model makes."""
    calls: Calls = {}

    def tell(op: _backend.Op, call: Any) -> None:
        calls.setdefault(_backend.bucket(op, call), (op, call))

    with _unchanged(model), _backend.telling_choices(tell):
        model(*args, **kwargs)
    if not calls:
        raise ValueError(
            f"tune: {type(model).__name__} leaves no call of tfm_kernels.ops to automatic choice; "
            "tfm_kernels.patch(model) puts fused layers in"
        )
    return calls


def _call_of(name: str, args: tuple, kwargs: dict[str, Any]) -> Calls:
    if name not in _backend.OPS:
        raise ValueError(f"tune: the op must be one of {', '.join(sorted(_backend.OPS))}, got {name!r}")
    if kwargs.get("backend") is not None:
        raise ValueError(f"tune: backend={kwargs['backend']!r} leaves nothing to choose; leave it out")
    op = _backend.OPS[name]
    call = _backend.described("tune", op, args, {key: value for key, value in kwargs.items() if key != "backend"})
    return {_backend.bucket(op, call): (op, call)}


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Buffers, such as the statistics of a batch norm, are the same afterwards."""
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def _rivals(op: _backend.Op, call: Any) -> list[str]:
    """Who may be chosen: not the reference, and no kernel that this kind of GPU has yet to prove."""
    names = [name for name in op.support if name != "reference" and op.proven(name, call)]
    return [name for name in names if op.support[name](call) is None]


def _measure(op: _backend.Op, call: Any, rivals: list[str], device: str, bucket: str) -> Row:
    stand_in = op.stand_in(call)
    with torch.set_grad_enabled(bool(stand_in.leaves)), torch.autocast(device, enabled=False):
        once = {name: _once(stand_in, name) for name in rivals}
        rounds = interleaved.race_calls(once, SECONDS, ROUNDS, LEAST, lambda: _wait(device))
    preferred = next((name for name in op.prefer(call) if name in rivals), rivals[0])
    ratios = {name: statistics.median(interleaved.ratios(rounds, name, preferred)) for name in rivals}
    best = min(ratios, key=ratios.__getitem__)
    seconds = {name: interleaved.median(rounds, name) for name in rivals}
    chosen = best if ratios[best] < GAIN else preferred
    return Row(bucket, device, seconds, chosen, _backend.select(op, call, None))


def _wait(device: str) -> None:
    """Until all GPUs are done, whichever the call's tensors are on."""
    for gpu in range(torch.cuda.device_count() if device == "cuda" else 0):
        torch.cuda.synchronize(gpu)


def _once(stand_in: _backend.StandIn, backend: str) -> Callable[[], object]:
    """One call, with its backward where there are leaves."""
    if not stand_in.leaves:
        return lambda: stand_in.run(backend)
    with torch.no_grad():
        ones = [torch.ones_like(output) for output in stand_in.run(backend)]
    return lambda: torch.autograd.grad(stand_in.run(backend), stand_in.leaves, ones)


def _keep(report: TuneReport) -> None:
    """Puts the choices into the table; what was measured counts in this process even where the file cannot be."""
    devices = {row.device for row in report.rows}
    try:
        for device in devices:
            rows = [row for row in report.rows if row.device == device]
            _measured.keep(device, {row.call: {"backend": row.chosen, "seconds": dict(row.seconds)} for row in rows})
        report.file = _measured.file() if devices else None
    except OSError as error:
        report.problem = str(error)
    finally:
        _backend.Choices.forget()
