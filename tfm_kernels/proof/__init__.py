"""prove(): the patched model makes no larger errors than PyTorch itself, on your model and your inputs."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .. import patching
from ..patching import frozen, swap
from ..patching.copying import copied, copied_apart
from ..patching.model import is_own
from . import compiled, modules, nearby, padding, precision, steps
from .repeated import call_repeatedly
from .repeated import compare as compare_repeated
from .report import ProofReport as ProofReport
from .report import Row as Row
from .rule import Judge, typical_error
from .runs import Call, named
from .side_by_side import Models, Originals, PatchedFails, Trio, run_three, told_apart
from .untouched import apart, gradients_kept

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def prove(
    model: nn.Module,
    inputs: Any,
    *,
    loss_fn: Callable[[Any], Tensor] | None = None,
    dtype: torch.dtype | None = None,
    steps: int = 0,
    limit: float = 1.05,
    compile: bool | None = None,
) -> ProofReport:
    """Compares the patched model with the original, tensor by tensor, against a float64 run of the original.

    error(patched) <= limit * error(original) + what chance and the last rounding explain       (P.1; proof/rule.py)

    Compared are the outputs, with and without a graph (integers exactly; in 16 bits also row by row); the gradient of
    every parameter, and of inputs that require one; the buffers that a call changes; ``steps`` training steps; and each
    replaced module alone, outputs and gradients, on the inputs that the original feeds it, so that a failure has a
    name. Each run begins with the buffers as they are. In training mode dropout is on, and both models drop the same
    elements. A note names each output that is not compared. Attention weights that a module of transformers returns
    unasked ("eager") are not: the fused one returns them on request.

    Repeated calls: after a call with other inputs (tensors rolled by one) the patched model's outputs must be right, in
    evaluation mode a second call must give the same bits, and no call may change what an earlier one returned; each
    only where the original does so.

    torch.compile: with ``compile`` the outputs, buffers and gradients of the patched model's compiled form are judged,
    too, by the same rule and beside the original as it is, padding included; all else is without it. Dropout drops the
    same elements there as well: graphs are given the numbers that code without a compiler draws. A model that draws
    for anything else is not run compiled, and a note says so.

    Packed stacks: the original is given the same zeros at padded positions, and all that the model makes of them is
    compared. An output, a loss, a buffer or a gradient that depends on what PyTorch computes there fails, with the
    advice ``patch(packed=False)``; padded positions of an output that has positions are excepted, with a note.

    Known exceptions:
    Where gradients or steps fail and nothing else does, they are measured again at up to six points nearby, because
    ReLU's kink makes them jump (proof/nearby.py).
    A query that sees no key, as at padding in front of a causal model, gets 0 from the fused attention, and the mean of
    all values from the "eager" one of transformers: such a model fails there. Prove it with right-padded inputs.
    In 16 bits, attention that PyTorch would compute in float32 (with dropout, or with a bias that needs a gradient) is
    measured by the same formula in 16 bits, which is what fused attention costs elsewhere.

    Args:
        model: in evaluation or training mode. Patched, it is proven as it is patched, with those options; unpatched,
            as ``patch(model)`` would patch it. It is copied, never changed. One patched with ``freeze=True`` has no
            gradients: its outputs without a graph are its own, all else is that of the same patch without freezing.
        inputs: what to call it with: a tensor, a tuple of arguments, or a dict of arguments by name.
        loss_fn: maps the model's output to the scalar to differentiate. None takes a fixed random weighting of every
            floating output.
        dtype: float16, bfloat16, float32 or float64 to run both models in; None is the model's own.
        steps: how many steps of SGD with momentum both models take, for the weights to be compared after.
        limit: the allowed ratio of errors in 16-bit types; float32 allows 2 / 1.05 times as much, since there the order
            of summation makes the error.
        compile: whether to prove the patched model under ``torch.compile`` (Inductor, its defaults) as well. None does
            where the model, or a module in it, came compiled; the original then runs without.

    Returns:
        A report: ``passed``, ``worst``, ``culprits``, ``table()``, ``to_json()``.

    Raises:
        TypeError, ValueError: an argument is wrong, or no output can be compared.
        RuntimeError: the patched model cannot run the call, or cannot be compiled.

    Cost: three copies of the model, one in float64; three times forward and backward, one more forward in float64 and
    two or three of the patched model, and as much for the modules; six times more where gradients alone fail. With
    ``compile`` what compiling takes, twice (with a graph and without), and five more runs.

    Example:
        >>> model = nn.TransformerEncoderLayer(8, 2, 32, batch_first=True)
        >>> padding = torch.arange(5) >= torch.tensor([[5], [3]])
        >>> inputs = {"src": torch.randn(2, 5, 8), "src_key_padding_mask": padding}
        >>> report = prove(model, inputs, dtype=torch.bfloat16)
        >>> assert report.passed, report.table()
    """
    return prove_patched(model, inputs, loss_fn=loss_fn, dtype=dtype, count=steps, limit=limit, compile=compile)


def prove_patched(
    model: nn.Module,
    inputs: Any,
    *,
    loss_fn: Callable[[Any], Tensor] | None = None,
    dtype: torch.dtype | None = None,
    count: int = 0,
    limit: float = 1.05,
    compile: bool | None = None,
    patch: Callable[[nn.Module], Any] | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> ProofReport:
    """prove() with the way of patching the original (in place), and a function that is told of each stage."""
    _check(model, loss_fn, dtype, count, limit, compile)
    with gradients_kept(model, loss_fn):
        return _proven(model, inputs, loss_fn, dtype, count, limit, compile, patch, progress)


def _proven(
    given: nn.Module,
    inputs: Any,
    loss_fn: Callable[[Any], Tensor] | None,
    dtype: torch.dtype | None,
    count: int,
    limit: float,
    compile: bool | None,
    patch: Callable[[nn.Module], Any] | None,
    progress: Callable[[str], None],
) -> ProofReport:
    started = time.perf_counter()
    asked = compiled.is_compiled(given) if compile is None else compile
    model = compiled.plain(given)
    own = dtype or _lowest_dtype(model)
    judge = Judge(own, float(limit))
    call = Call.of(inputs).to(dtype)

    progress("copying")
    stock = copied_apart(model)
    patching.unpatch(stock)
    stock = stock if dtype is None else stock.to(dtype)
    exact = precision.exact(stock)
    if patch is None and patching.settings(model):
        patched = copied(model) if dtype is None else copied(model).to(dtype)
    else:
        patched = copied(stock)
        (patch or patching.patch)(patched)
    names = modules.replaced(stock, patched)
    report = ProofReport(type(model).__name__, str(own)[6:], float(limit), model.training, names)
    report.options = patching.settings(patched)
    if not names:
        report.notes.append("nothing was replaced: both models run the same code")
    ours = sum(map(is_own, stock.modules()))
    if ours:
        report.notes.append(f"both models hold modules of tfm_kernels.nn ({ours}), not compared with PyTorch's")

    models = Models(exact, stock, patched)
    try:
        progress("patched model without a graph")
        with told_apart(models, call, own, loss_fn):
            with apart(given, patched):
                repeated = call_repeatedly(patched, call)
        form = compiled.form(patched, call, report.notes, progress, asked=compile is True) if asked else None
        left_out = repeated.left_out
        _thaw(patched, report.notes)
        progress("original in float64, recording the inputs of the replaced modules")
        with _told_of_script(exact):
            raw, calls, notes = modules.record(exact, call, names, own, loss_fn)
        known = functools.partial(padding.at_padding, raw.outputs, left_out=left_out)
        trio = run_three(models, call, own, left_out, loss_fn, known, progress)
    except PatchedFails as error:
        raise RuntimeError(f"prove: the patched {report.model} fails where the original runs: {error}") from error
    repeated.look()
    report.rows += padding.reads(raw, trio.exact, left_out, trio.reached, with_loss=loss_fn is not None)
    report.notes += padding.notes(trio.ignored)
    typical = typical_error(trio.exact.gradients, trio.stock.gradients)
    outputs = judge.compare("output", *trio.outputs(), module="", typical=typical, by_row=True)
    unseen = _not_compared(trio, {row.tensor for row in outputs})
    if not outputs:
        reason = "; ".join(unseen) or "it gives no tensor"
        raise ValueError(f"prove: no output of {report.model} can be compared: {reason}")
    report.rows += outputs
    report.notes += [f"{each}, which is not compared" for each in unseen]
    plain = trio.exact.outputs, trio.stock.outputs, repeated.first.copies
    report.rows += judge.compare("output", *named(plain, "no_grad"), module="", typical=typical, by_row=True)
    report.rows += compare_repeated(repeated, stock, call)
    if form is not None:
        packs = bool(left_out.masks())
        ways = ((padding.LeftOut(), padding.nowhere), (left_out, known))[: 1 + packs]
        try:
            report.rows += form.beside(models, own, loss_fn, ways, judge, typical)
        except compiled.CompileFails as error:
            compiled.failed(error, report.notes, compile is True)
            form = None
    del repeated
    for name, module in patched.named_modules():
        found = swap.fallbacks(module)
        report.notes += [f"{name or 'the model'} ran its original code, because {reason}" for reason in found]
    report.rows += judge.compare("buffer", *trio.buffers(), typical=typical)
    report.notes += notes
    alone = list(modules.compare_alone(models, calls, judge, report.notes, progress, wrong=bool(report.failures)))
    told = all(row.passed for row in report.rows + alone)  # else it is known that something is wrong, and what
    again = functools.partial(nearby.judged_again, models=models, dtype=own, tell=progress)

    def gradients(done: Trio) -> list[Row]:
        rows = judge.compare("gradient", *done.gradients(), rows_summed=done.rows, no_more=True)
        return rows + (form.gradients(judge) if form is not None else [])

    def gradients_there() -> list[Row]:
        done = run_three(models, call, own, left_out, loss_fn, lambda outputs: trio.ignored)
        if form is not None:
            form.run_again()
        return gradients(done)

    rows = gradients(trio)
    report.rows += again(rows, compare=gradients_there) if told else rows
    report.rows += alone
    if count:
        rate = steps.learning_rate(exact, trio.exact.gradients)
        originals = Originals(models, left_out, own)

        def trained() -> list[Row]:
            paths = steps.train_all(originals, call, count, rate, loss_fn, trio.ignored, progress)
            found = judge.compare("step", *(path.losses for path in paths), module="", typical=typical)
            return found + judge.compare("step", *(path.moves for path in paths), no_more=True)

        rows = trained()
        report.rows += again(rows, compare=trained) if told else rows
    report.seconds = time.perf_counter() - started
    return report


@contextlib.contextmanager
def _told_of_script(exact: nn.Module) -> Iterator[None]:
    """Says what TorchScript's errors, which may be without words, come of: constants in a graph keep their dtype."""
    try:
        yield
    except RuntimeError as error:
        part = next((name for name, m in exact.named_modules() if isinstance(m, torch.jit.ScriptModule)), None)
        if part is None:
            raise
        raise ValueError(
            f"prove: {part or 'the model'}, compiled by TorchScript, cannot run in float64; prove the model before"
        ) from error


def _not_compared(trio: Trio, compared: set[str]) -> list[str]:
    """What is not compared of the outputs, and why: "output.state is of type Cache"."""
    whole = {name: value for name, value in trio.exact.outputs.items() if name not in compared}
    nothing = {name: "NaN or infinite in PyTorch" if value.numel() else "empty" for name, value in whole.items()}
    return [f"{name} is of type {kind}" for name, kind in trio.stock.unknown.items()] + [
        f"{name} is {what}" for name, what in nothing.items()
    ]


def _thaw(patched: nn.Module, notes: list[str]) -> None:
    """Gives the weights of a model that came frozen free for all that needs gradients; a note says what that proves."""
    used = {module: frozen.nbytes(module) > 0 for module in patched.modules() if frozen.is_frozen(module)}
    if used:
        notes.append(
            f"the outputs without a graph are the frozen model's ({sum(used.values())} of {len(used)} frozen modules "
            "packed their weight for this call); it has no gradients, so all else is that of the same patch without "
            "freeze=True"
        )
    for module in used:
        frozen.thaw(module)


def _lowest_dtype(model: nn.Module) -> torch.dtype:
    """The floating dtype of the model's parameters; of several, the one with the largest rounding."""
    found = {parameter.dtype for parameter in model.parameters() if parameter.dtype in DTYPES}
    return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=torch.get_default_dtype())


def _check(model: Any, loss_fn: Any, dtype: Any, count: Any, limit: Any, compile: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"prove: model must be a torch.nn.Module, got {type(model).__name__}")
    held = ((name, each) for name, each in model.named_modules() if isinstance(each, torch.jit.ScriptModule))
    trained = (name or "the model" for name, each in held if any(p.requires_grad for p in each.parameters()))
    compiled = next(trained, None)
    if compiled is not None:
        raise ValueError(
            f"prove: TorchScript has compiled {compiled}, whose gradients cannot be had in float64; give it "
            "requires_grad_(False), or prove the model before"
        )
    if any(tensor.device.type == "mps" for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError(
            "prove: MPS has no float64, which proofs are made in; move the model and its inputs to the CPU"
        )
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"prove: loss_fn must be a function or None, got {type(loss_fn).__name__}")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"prove: dtype must be float16, bfloat16, float32, float64 or None, got {dtype}")
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError(f"prove: steps must be an integer >= 0, got {count!r}")
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 1.0 <= limit < float("inf"):
        raise ValueError(f"prove: limit must be a finite number >= 1, got {limit!r}")
    if compile is not None and not isinstance(compile, bool):
        raise TypeError(f"prove: compile must be True, False or None, got {compile!r}")
