"""When the error of the patched model is small enough: no larger than what PyTorch itself makes in that dtype.

R is a float64 run of the original on the very weights and inputs the dtype holds, S the original in the dtype, K the
patched model in the dtype (R and S: precision.py); |.| is the Frobenius norm, n the number of elements, u the dtype's
unit roundoff.

    |K - R| <= factor |S - R| + (0.02 u + walk + 3 t / sqrt(m)) scale                                  (size)
    |<K - R, R>| / <R, R> <= factor |<S - R, R>| / <R, R> + leaning + 4 |K - R| / (sqrt(rows) |R|)     (bias)
    |K_i - R_i| <= (4 + 8 / sqrt(columns)) max(|S_i - R_i|, q |R_i|, q r)                              (row)

factor is ``limit`` for 16-bit types, where storage rounding makes the error and a fused kernel rounds less often. For
float32 and float64 it is limit * 2 / 1.05, so 2 by default: there the order of the sums makes it, which differs between
any two libraries (rule C2 of the numeric contract, tfm_kernels/testing, has the same numbers).

3 t / sqrt(m): m samples measure a typical error t only to about 1 / sqrt(m) of itself; three of these. t is the largest
of u / 2, of |S - R| / scale, of the same for all tensors of its kind together, and, for outputs and losses, of the same
for the gradients (a loss is one sample: it may be right by luck). m is counted from the errors: (sum of e)^2 / sum of
e^2, over the squared errors e of the rows, or of the columns, of S and of K, whichever is least. A pre-activation near
ReLU's kink falls to the one side or the other, and then a handful of rows of a weight's gradient hold most of its
error. A whole model or stack hands errors on until all lean on each other, so there m <= sqrt(n): measured on MiniLM in
bfloat16, another library's LayerNorm, no better and no worse, changed the error of a weight's gradient by up to 14 %,
of a bias's by up to 37 %. The gradient of a bias adds one error per token along a few directions: m <= sqrt(n), too.

scale = max(|R|, |all| sqrt(n / N)): a tensor is never judged by less than its fair share, by elements, of the norm of
all tensors of its kind. The gradient of a bias on attention's keys is 0 in exact arithmetic (softmax does not see it),
so what any program computes there is rounding noise, large beside 0 and nothing beside the model's gradient. Where the
truth is so small, |R| < t scale, S may be nearer to it than K for reasons of its own: PyTorch's composed attention
takes the row sums of its backward from the weights, its fused one, as ours, from the rounded output. |S - R| counts as
3 t there.

walk: the gradient of a vector, as a bias or a norm's weight, sums over rows, for which the numeric contract gives a
kernel that walks over them a part of its own, in float32, beside torch.sum's tree (testing/rounding.py).

The second rule is for layers fed alone in 16 bits: 0.1 % too large is within the noise of bfloat16 in size, but not in
direction. leaning = 0.05 u for outputs and 0.15 u for gradients (rule C3); biases are too short to tell.

The third rule is for the rows i of outputs in 16 bits, a token each. One that is entirely wrong, its error as large as
itself, hides from the first rule among 20,000 others where PyTorch errs by 3 %, and behind a single one that is a
hundred times as large (the first token of many models) wherever it stands. q is the larger of t and the median of
|S_i - R_i| / |R_i|, r the median of |R_i|: medians heed the rows that are many, not those that are large. Measured on
small BERT, DistilBERT, GPT-2 and T5, rows of 32 to 100 columns, the worst row of an honest patch had 1.7 times what
stands behind the factor; short rows scatter more. In float32 a row that is wrong cannot hide so.

Gradients that fail by size, of the whole model or of a module fed alone, where nothing else fails, are judged again at
points nearby (nearby.py).

Integers and bools have no error: where R and S agree K must, too, and elsewhere be one of both.

float64 cannot be measured against itself: there |K - R| <= 2^-40 scale, a hundred times what sums of 10^4 terms round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..testing.rounding import rounding, walk
from .report import Row


@dataclass(frozen=True)
class Judge:
    """The rule for one dtype and limit.

    Attributes:
        dtype: what both models ran in.
        limit: factor for 16-bit types.
    """

    dtype: torch.dtype
    limit: float

    @property
    def factor(self) -> float:
        """The allowed ratio of errors, before what chance adds."""
        return self.limit if rounding(self.dtype).narrow else self.limit * 2.0 / 1.05

    def compare(
        self,
        kind: str,
        truth: Mapping[str, Tensor],
        stock: Mapping[str, Tensor],
        patched: Mapping[str, Tensor],
        *,
        module: str | None = None,
        leaning: float | None = None,
        typical: float = 0.0,
        rows_summed: int = 0,
        no_more: bool = False,
        by_row: bool = False,
    ) -> list[Row]:
        """One row to three for each tensor of one kind.

        Args:
            kind: of the rows.
            truth: name -> R, float64.
            stock: name -> S.
            patched: name -> K.
            module: the rows' module; None takes it from the tensor's name, "encoder.0.weight" -> "encoder.0".
            leaning: what a leaning error of a layer fed alone may have, in units of u; None where errors are handed on
                from layer to layer.
            typical: the least that counts as a typical error, relative.
            rows_summed: over how many rows the gradients of vectors sum.
            no_more: whether what only the patched model gives must be 0, as a gradient; else it is not judged.
            by_row: whether each row of a tensor is judged as well, in 16 bits.
        """
        rows, errors = [], {}
        for name, exact in truth.items():
            place, tensor = _place(kind, name, module)
            problem = _form(exact, stock.get(name), patched.get(name))
            if problem is None and not exact.is_floating_point():
                rows.append(_exactly(kind, place, tensor, exact, stock[name], patched[name]))
            elif problem is None:
                errors[name] = _Error(exact, stock[name], patched[name])
                problem = errors[name].lost
            if problem is not None:
                rows.append(Row(kind, place, tensor, exact.numel(), 0.0, math.inf, 0.0, "form", problem))
                errors.pop(name, None)
        more = patched.keys() - truth.keys() - stock.keys() if no_more else ()
        for name in sorted(name for name in more if bool(patched[name].any())):
            place, tensor = _place(kind, name, module)
            count = patched[name].numel()
            rows.append(Row(kind, place, tensor, count, 0.0, math.inf, 0.0, "form", "PyTorch gives none"))
        total = math.sqrt(sum(error.size**2 for error in errors.values()))
        pooled = math.sqrt(sum(error.stock**2 for error in errors.values())) / total if total else 0.0
        typical = max(typical, pooled, rounding(self.dtype).unit / 2)
        elements = sum(error.elements for error in errors.values())
        for name, error in errors.items():
            if error.compared:
                share = total * math.sqrt(error.elements / max(elements, 1))
                place, tensor = _place(kind, name, module)
                fresh = leaning is not None and error.rows > 1
                samples = error.samples if fresh else min(error.samples, math.sqrt(max(error.elements, 1)))
                extra = walk(rows_summed) if truth[name].dim() == 1 else 0.0
                rows.append(self._size(kind, place, tensor, error, max(error.size, share), typical, samples, extra))
                if leaning is not None and fresh and rounding(self.dtype).narrow and error.size > 0.5 * share:
                    rows.append(self._bias(kind, place, tensor, error, leaning))
                if by_row and error.rows > 1 and rounding(self.dtype).narrow:
                    rows.append(_worst_row(kind, place, tensor, error, typical))
        return rows

    def _size(
        self,
        kind: str,
        module: str,
        tensor: str,
        error: _Error,
        scale: float,
        typical: float,
        samples: float,
        extra: float,
    ) -> Row:
        scale = scale or 1.0  # everything is 0 in exact arithmetic
        stock, patched = error.stock / scale, error.patched / scale
        if self.dtype == torch.float64:
            return Row(kind, module, tensor, error.elements, stock, patched, 2.0**-40)
        chance = 3.0 * max(stock, typical) / math.sqrt(samples)
        measure = max(stock, 3.0 * typical) if error.size < typical * scale else stock
        allowed = self.factor * measure + 0.02 * rounding(self.dtype).unit + extra + chance
        return Row(kind, module, tensor, error.elements, stock, patched, allowed)

    def _bias(self, kind: str, module: str, tensor: str, error: _Error, leaning: float) -> Row:
        chance = 4.0 * error.patched / error.size / math.sqrt(error.rows)
        allowed = self.factor * error.stock_bias + leaning * rounding(self.dtype).unit + chance
        return Row(kind, module, tensor, error.elements, error.stock_bias, error.patched_bias, allowed, "bias")


def typical_error(truth: Mapping[str, Tensor], stock: Mapping[str, Tensor]) -> float:
    """|S - R| / |R| of all tensors together."""
    both = [(exact.double(), stock[name].double()) for name, exact in truth.items() if name in stock]
    size = sum(float(exact.square().sum()) for exact, _ in both)
    found = math.sqrt(sum(float((s - exact).square().sum()) for exact, s in both) / size) if size > 0.0 else 0.0
    return found if math.isfinite(found) else 0.0


def _worst_row(kind: str, module: str, tensor: str, error: _Error, typical: float) -> Row:
    """The row of a tensor whose error is the largest part of what it may be."""
    size, stock, patched = error.by_row
    touched = size > 0.0
    typical = max(typical, float((stock[touched] / size[touched]).median()) if touched.any() else 0.0)
    least = typical * (size[touched].median() if touched.any() else 1.0)
    allowed = (4.0 + 8.0 / math.sqrt(error.columns)) * torch.maximum(stock, typical * size).clamp_min(least)
    place = int((patched / allowed).argmax())
    scale = float(size[place]) or float(size.max()) or 1.0
    where = tuple(int(index) for index in torch.unravel_index(torch.tensor(place), error.row_shape))
    found, own, most = (float(each[place]) / scale for each in (patched, stock, allowed))
    return Row(kind, module, tensor, error.columns, own, found, most, "row", f"row {where}")


class _Error:
    """The errors of one tensor, where R is finite; where R and S are the same infinity, K must be, too.

    NaN of R says nothing: PyTorch gives it to rows that may attend to nothing, whose output is 0 here.
    """

    def __init__(self, exact: Tensor, stock: Tensor, patched: Tensor) -> None:
        exact, stock, patched = (t.detach().to("cpu", torch.float64) for t in (exact, stock, patched))
        self.lost: str | None = None
        finite = exact.isfinite()
        lost = finite & stock.isfinite() & ~patched.isfinite()
        if lost.any():
            self.lost = f"{int(lost.sum())} elements are NaN or infinite that are finite in PyTorch"
        moved = exact.isinf() & (exact == stock) & (patched != stock)
        if moved.any():
            self.lost = f"{int(moved.sum())} elements are not the infinity that PyTorch gives"
        used = finite & stock.isfinite() & patched.isfinite()
        if not used.all():
            exact, stock, patched = (t.where(used, 0.0) for t in (exact, stock, patched))
        touched = used & ((exact != 0.0) | (stock != 0.0) | (patched != 0.0))  # most rows of an embedding are not
        self.compared = bool(used.any())
        self.elements = int(touched.sum())
        self.rows = max(1, int(touched.any(-1).sum()) if touched.dim() > 1 else 1)
        self.columns = exact.shape[-1] if exact.dim() else 1
        self.row_shape = exact.shape[:-1]
        rows = (exact, stock - exact, patched - exact)
        self.by_row = [t.norm(dim=-1).flatten() if t.dim() else t.abs().reshape(1) for t in rows]
        self.samples = min(_samples(stock - exact), _samples(patched - exact))
        self.size = float(exact.norm())
        self.stock, self.patched = float((stock - exact).norm()), float((patched - exact).norm())
        square = self.size**2 or 1.0
        self.stock_bias = abs(float(((stock - exact) * exact).sum())) / square
        self.patched_bias = abs(float(((patched - exact) * exact).sum())) / square


def _samples(error: Tensor) -> float:
    """How many equal, independent parts would scatter as the rows or the columns of this error do."""
    squares = error.square().flatten(0, -2) if error.dim() > 1 else error.square().reshape(-1, 1)
    least = float("inf")
    for parts in (squares.sum(0), squares.sum(1)):
        if parts.numel() > 1 and bool(parts.any()):
            least = min(least, float(parts.sum().square() / parts.square().sum()))
    return least if math.isfinite(least) else float(max(1, error.numel()))


def _exactly(kind: str, module: str, tensor: str, exact: Tensor, stock: Tensor, patched: Tensor) -> Row:
    """The row of a tensor of integers or bools."""
    exact, stock, patched = (t.detach().cpu() for t in (exact, stock, patched))
    wrong = int(((patched != stock) & (patched != exact)).sum())
    detail = f"{wrong} of {exact.numel()} elements differ from PyTorch's" if wrong else "equal to PyTorch's"
    return Row(kind, module, tensor, exact.numel(), 0.0, math.inf if wrong else 0.0, 0.0, "form", detail)


def _form(exact: Tensor, stock: Tensor | None, patched: Tensor | None) -> str | None:
    if patched is None:
        return "the patched model has no such tensor"
    if stock is None:
        return "the original has no such tensor in this dtype"
    if patched.shape != stock.shape:
        return f"shape {tuple(patched.shape)} instead of {tuple(stock.shape)}"
    if patched.dtype != stock.dtype:
        return f"{str(patched.dtype)[6:]} instead of {str(stock.dtype)[6:]}"
    return None


def _place(kind: str, name: str, module: str | None) -> tuple[str, str]:
    """The module and the words for a tensor: gradients and steps are known by their parameter's full name."""
    if module is not None:
        return module, name
    path, _, last = name.rpartition(".")
    return path, f"{kind} of {last}"
