"""tfm_kernels/triton/_replay.py: a call that was recorded launches what its launcher would, and nothing else."""

import subprocess
import sys
import threading
import weakref

import pytest
import torch

from bench.launch import host_driver, host_only
from tests.aot.repeated import OUTSIDE, launch, repeated
from tests.cases import pairs_once
from tfm_kernels import Mask, _library, ops
from tfm_kernels.testing import run
from tfm_kernels.triton import _launch, _replay
from tfm_kernels.triton._sums import sum_rows_kernel

CASES = {op: [case for case in pairs_once() if case.op == op] for op in sorted({case.op for case in pairs_once()})}


def names_of(inputs, results):
    """Address of a storage -> what it is."""
    found = {}
    for kind, tensors in (("gradient of", results.grads), ("dout of", results.douts), ("output", results.outputs)):
        found |= {t.untyped_storage().data_ptr(): f"{kind} {name}" for name, t in tensors.items() if t is not None}
    for name, value in inputs.items():
        parts = (value.key_lengths, value.keep_matrix) if isinstance(value, Mask) else (value,)
        for number, t in enumerate(parts):
            if isinstance(t, torch.Tensor):
                found[t.untyped_storage().data_ptr()] = f"{name} {number}"
    return found


def in_words(launches, names):
    """Launches with tensors by name, or by number where they were made and let go, and the place they begin at."""
    numbers = {}

    def word(value):
        if not isinstance(value, torch.Tensor):
            return value
        if not value.numel():
            return "nothing"
        first = value.untyped_storage().data_ptr()
        name = names.get(first) or numbers.setdefault(first, f"made {len(numbers)}")
        return name, value.data_ptr() - first

    return [(kernel.fn.__name__, grid, [word(value) for value in given]) for kernel, grid, given, _ in launches]


def laid(tensors):
    return {name: t if t is None else (t.dtype, t.shape, t.stride()) for name, t in tensors.items()}


@pytest.mark.parametrize("op", CASES)
def test_every_launcher_is_repeated(op, told):
    launched = 0
    for case in CASES[op]:
        called = []
        for number in range(4):
            told.clear()
            inputs = case.inputs()
            if number:
                results = run(case.op, inputs, "triton", douts=case.douts)
            else:
                with _library.plans_anew():
                    results = run(case.op, inputs, "triton", douts=case.douts)
            repeated = {launch[3] for launch in told}
            called.append((in_words(told, names_of(inputs, results)), laid(results.outputs), laid(results.grads)))
            assert repeated <= {number == 3} or number in (1, 2), case.id  # a case before may have been like this one
        assert called[3] == called[2] == called[1] == called[0], case.id
        launched += len(called[0][0])
    assert launched > len(CASES[op])


def test_the_third_call_is_the_first_repeated(told):
    planned = []

    def double(x):
        planned.append(x)
        y = torch.empty((2, 3))
        launch(x, y)
        return y

    calls = [torch.zeros(2, 3) for _ in range(3)]
    *_, (launches, y) = repeated(told, double, *((x,) for x in calls))
    assert len(planned) == 2 and y.shape == (2, 3)
    ((kernel, grid, given, again),) = launches
    assert kernel is sum_rows_kernel and grid == (1, 1, 1) and again
    assert given[0] is calls[-1] and given[1] is y


def test_one_thread_records_at_a_time(told):
    """Another one calls its launcher meanwhile, and records a later call."""
    planned = []

    def double(x):
        planned.append(x)
        launch(x)
        return torch.empty(1)

    launcher, x = _replay.Launcher(double, _library._launch_key), torch.zeros(3)
    launcher(x)
    with _replay._recording:
        launcher(x), launcher(x)
    launcher(x), launcher(x)
    assert len(planned) == 4 and not _replay._recording.locked()


def test_recording_leaves_torchs_compiler_alone():
    """It does not import it, which takes seconds, and changes no flag of the process that it reads."""
    code = (
        "import sys, torch\nfrom tfm_kernels.triton import _replay\nx = torch.ones(2)\n"
        "from torch.utils import _python_dispatch as modes\n"
        "with _replay.Recorder([x]):\n    torch.empty(2), x + x\n"
        "    assert not modes.is_in_any_mode_without_ignore_compile_internals()\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_other_layouts_are_other_calls(told):
    planned = []

    def double(x, others):
        planned.append(x)
        launch(x)
        return torch.empty(1)

    x = torch.zeros(64)
    calls = [
        (x[:32], [1]), (x[1:33], [1]), (x[:32], [2]), (x[::2], [1]), (x[:32].double(), [1]), (x[:32][None], [1]),
        (x[:32], None),
    ]  # fmt: skip
    repeated(told, double, *calls * 3)
    assert len(planned) == 2 * len(calls)
    torch.backends.cuda.matmul.fp32_precision, before = "tf32", torch.backends.cuda.matmul.fp32_precision
    try:
        launcher = _replay.Launcher(double, _library._launch_key)
        launcher(*calls[0])
        launcher(*calls[0])
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        told.clear()
        launcher(*calls[0])
        assert not told[0][3]
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_one_tensor_for_two_is_another_call(told):
    def add(x, y):
        z = torch.empty_like(x)
        launch(x, y, z)
        return z

    x, y, z = (torch.zeros(4) for _ in range(3))
    *_, (same, _), (launches, _) = repeated(told, add, (x, x), (x, x), (y, y), (x, y), (x, y), (z, y))
    assert [t is z or t is y for t in launches[0][2][:2]] == [True, True] and launches[0][2][0] is z
    launcher = _replay.Launcher(add, _library._launch_key)
    for call in ((x, x), (x, x), (z, y)):  # a key that took them for the same would give x twice
        told.clear()
        launcher(*call)
    assert told[0][2][0] is z and told[0][2][1] is y and not told[0][3]


def test_views_begin_where_they_did(told):
    def parts(x):
        made = torch.empty((4, 8))
        launch(x[1], x.view(torch.int32), made[2:], made.t())
        return made.t(), made.new_empty((2, 3)).transpose(0, 1)

    storage = torch.arange(100.0)
    calls = [(storage[first : first + 6].view(2, 3),) for first in (0, 4, 8)]
    *_, (launches, (y, z)) = repeated(told, parts, *calls)
    first, second, third, fourth = launches[0][2][:4]
    assert launches[0][3] and first.data_ptr() == storage[11:].data_ptr() and first.shape == (3,)
    assert second.data_ptr() == storage[8:].data_ptr() and fourth.data_ptr() == y.data_ptr()
    assert third.data_ptr() == y.data_ptr() + 2 * 8 * 4
    assert (y.shape, y.stride()) == ((8, 4), (1, 8)) and (z.shape, z.stride()) == ((3, 2), (1, 3))


def test_operators_are_called_again(told):
    def scaled(x, factor):
        y = -x * factor
        y[1:].zero_()
        y[0].copy_(x[1])
        sums = torch.zeros(2)
        launch(y, sums)
        sums += y.sum(1)
        return sums.to(torch.float64), y

    x = [torch.randn(2, 3) for _ in range(3)]
    *_, (launches, (sums, y)) = repeated(told, scaled, *((t, 2.0) for t in x))
    assert launches[0][3] and launches[0][2][0] is y
    wanted = torch.stack([x[2][1], torch.zeros(3)])
    assert torch.equal(y, wanted) and torch.equal(sums, wanted.sum(1).double())


REFUSED = {
    "reads what a tensor holds": lambda x: torch.zeros(1) if x.sum().item() > 0 else torch.ones(1),
    "takes a tensor from elsewhere": lambda x: launch(OUTSIDE) or torch.zeros(1),
    "calculates with a tensor from elsewhere": lambda x: x + OUTSIDE,
    "makes a tensor of numbers": lambda x: torch.tensor([1.0]) + x,
    "calculates with a tensor's bits": lambda x: x.view(torch.int32) + 1,
    "returns what it was given": lambda x: x.view(-1),
    "returns a tensor from elsewhere": lambda x: OUTSIDE,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_never_repeated(name, told):
    planned = []

    def launcher(x):
        planned.append(x)
        return REFUSED[name](x)

    calls = [(torch.full((1,), float(value)),) for value in (1, 2, 3, -1)]
    results = [result for _, result in repeated(told, launcher, *calls)]
    assert len(planned) == 4
    assert all(torch.equal(result, REFUSED[name](*call)) for result, call in zip(results, calls, strict=True))


def test_a_call_that_is_refused_is_refused_again(told):
    def refuse(x):
        if x.shape[0] == 2:
            raise ValueError("x must not have 2 rows, got 2")
        return torch.empty(1)

    launcher = _replay.Launcher(refuse, _library._launch_key)
    for _ in range(4):
        with pytest.raises(ValueError, match="x must not have 2 rows, got 2"):
            launcher(torch.zeros(2))
    launch(OUTSIDE)  # nobody listens any more


def test_values_live_no_longer_than_they_are_needed(told):
    alive = []

    def chain(x):
        for _ in range(5):
            torch.empty_like(x)
            y = torch.empty_like(x)
            alive.append(weakref.ref(y))
            launch(x, y)
            x = y
        return x

    x = torch.zeros(3)
    launcher = _replay.Launcher(chain, _library._launch_key)
    launcher(x)
    launcher(x)
    told.clear()
    assert not any(ref() is not None for ref in alive)  # nor does the record keep them
    (replay,) = _replay._found.values()
    most, steps = [], replay._program

    def counted(step):
        def run(values):
            step(values)
            most.append(sum(value is not None for value in values[1:]))

        return run

    replay._program = [counted(step) for step in steps]
    launcher(x)
    assert max(most) == 2


def test_threads_do_not_hear_each_other(told):
    heard = []
    before = _launch.tell(lambda *launch: heard.append(launch))
    thread = threading.Thread(target=launch, args=(OUTSIDE,))
    thread.start()
    thread.join()
    assert before is None and not heard and len(told) == 1
    launch(OUTSIDE)
    _launch.tell(None)
    launch(OUTSIDE)
    assert len(heard) == 1


def test_another_driver_is_another_gpu(told):
    planned = []

    def double(x):
        planned.append(x)
        launch(x)
        return torch.empty(1)

    x = torch.zeros(1)
    launcher = _replay.Launcher(double, _library._launch_key)
    for _ in range(3):
        launcher(x)
    assert len(planned) == 2
    with host_only(host_driver(80)):
        launcher(x)
        assert len(planned) == 3
        launcher(x)
    assert len(planned) == 3


def test_keys_are_forgotten(told, monkeypatch):
    monkeypatch.setattr(_replay, "LIMIT", 3)
    launcher = _replay.Launcher(lambda x: torch.empty(1), _library._launch_key)
    for n in range(1, 10):
        launcher(torch.zeros(n))
        assert len(_replay._found) <= 3


def test_gradients_are_those_of_the_first_call(told):
    """The C++ node of autograd: a repeated call's outputs are new tensors, with a graph of their own."""
    x = torch.randn(4, 64, requires_grad=True)
    outputs = [ops.rms_norm(x, backend="triton") for _ in range(4)]
    assert told[-1][3] and len({y.data_ptr() for y in outputs}) == 4
    assert all(y.requires_grad and y.grad_fn is not None for y in outputs)
    for y in outputs:
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert dx.shape == x.shape
    assert told[-1][3]
