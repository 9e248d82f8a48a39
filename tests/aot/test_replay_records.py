"""tfm_kernels/triton/_replay.py: layouts, devices, defaults and listeners of a recorded call, and its memory."""

import weakref
from contextlib import contextmanager

import pytest
import torch
import triton
from triton.runtime.jit import JITFunction

from tests.aot.repeated import OUTSIDE, launch, repeated
from tfm_kernels import _library
from tfm_kernels.triton import _launch, _replay
from tfm_kernels.triton._sums import sum_rows_kernel

MADE = {
    "written before it is turned": lambda y, x: (y.copy_(x).t(), -x),
    "returned and turned": lambda y, x: (y, y.t()),
    "returned in part": lambda y, x: (y[:1], -x),
    "beside what has the argument's layout and begins elsewhere": lambda y, x: (y, x.as_strided((2, 3), (3, 1), 1) + 1),
}


@pytest.mark.parametrize("name", MADE)
def test_what_is_made_has_the_room_and_the_layout_that_it_had(name, told):
    def make(x):
        y = torch.empty_like(x)
        launch(x, y)
        return MADE[name](y, x)

    x = torch.arange(8.0)[:6].view(2, 3)
    (_, planned), _, (launches, again) = repeated(told, make, *[(x,)] * 3)
    assert launches[0][3]
    for expected, found in zip(planned, again, strict=True):
        assert torch.equal(found.nan_to_num(-1.0), expected.nan_to_num(-1.0)) and found.stride() == expected.stride()
        assert found.untyped_storage().nbytes() == expected.untyped_storage().nbytes()


def test_tensors_are_made_on_the_device_that_they_were_on(told):
    *_, (_, y) = repeated(told, lambda x: torch.empty((2, 3), device="meta"), *[(torch.zeros(1),)] * 3)
    assert y.device.type == "meta" and y.shape == (2, 3)


@triton.jit
def defaulted_kernel(x_ptr, n=3):
    pass


def test_defaults_of_a_kernel_are_given_again(told):
    def make(x):
        _launch.launch(defaulted_kernel, (1,), x_ptr=x)
        return torch.empty(1)

    x = torch.zeros(1)
    *_, (((_, _, given, again),), _) = repeated(told, make, *[(x,)] * 3)
    assert again and given[0] is x and given[1:] == [3]


@pytest.mark.parametrize("why", ["hooks", "not compiled"])
def test_launches_that_are_never_repeated(why, told, monkeypatch):
    if why == "hooks":
        monkeypatch.setattr(sum_rows_kernel, "pre_run_hooks", [lambda *args, **given: None])
    else:
        monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **given: None)
    planned = []

    def make(x):
        planned.append(x)
        launch(x)
        return torch.empty(1)

    repeated(told, make, *[(torch.zeros(1),)] * 4)
    assert len(planned) == 4


STEPS = {"kernel": lambda x: launch(x) or torch.empty(1), "operator": lambda x: x + 1}


@pytest.mark.parametrize("step", STEPS)
def test_a_record_keeps_no_argument_alive(step, told):
    launcher = _replay.Launcher(STEPS[step], _library._launch_key)
    for number in range(3):
        x = torch.zeros(3)
        alive = weakref.ref(x)
        launcher(x)
        told.clear()
        del x
        assert alive() is None, number


def test_who_listened_before_a_record_listens_after_it(told):
    listener = lambda *launch: None
    _launch.tell(listener)
    repeated(told, lambda x: launch(x) or torch.empty(1), *[(OUTSIDE,)] * 2)
    assert _launch.tell(None) is listener


@pytest.mark.parametrize("index", [1, 90])  # 90 is current, as host_driver() says
def test_a_call_runs_on_its_own_gpu(index, told, monkeypatch):
    entered = []

    @contextmanager
    def device(index):
        entered.append(index)
        yield
        entered.append("left")

    monkeypatch.setattr(torch.cuda, "device", device)
    make = _replay.Make((1,), (1,), torch.float32, torch.device("cpu"))
    replay = _replay.Replay(_replay.Record(0, [make], [_replay.Whole(0)]), torch.device("cuda", index))
    assert replay(()).shape == (1,) and entered == ([] if index == 90 else [1, "left"])
