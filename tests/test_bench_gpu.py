"""`python -m bench.gpu` as far as it goes without a GPU: arguments, processes, time, resuming, refusals."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from bench.gpu import __main__ as gpu
from bench.gpu import conductor
from bench.gpu.part import DEVICE_LOST, GREEN, RED, UNAVAILABLE, Item, NotYetError, Part
from bench.gpu.parts import PARTS
from bench.gpu.subjects import STEMS

NOW = {
    "protocol": 1, "device": "fake", "gpu": "Fake 1", "driver": "1", "torch": "2", "triton": "3", "nvcc": "13.0",
    "sources": "abc", "date": "monday",
}  # fmt: skip


def part(name="contract", seconds=1.0, **items):
    """A part whose items are functions by name."""
    made = [Item(key, run, "rms_norm") for key, run in items.items()]
    return Part(name, "a fake", seconds, lambda room, results: iter(made))


def run(tmp_path, *parts, words=(), now=NOW):
    code = gpu.main(["--out", str(tmp_path), *words], parts, lambda: now)
    return code, {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}


def states(files, name="contract"):
    return {item["key"]: item["state"] for item in files[name]["groups"]}


def fail():
    raise AssertionError("y is wrong")


def test_all_green(tmp_path, capsys):
    code, files = run(tmp_path, part("build", a=dict), part(b=lambda: {"C1": 0.5}))
    assert code == 0 and states(files, "build") == {"a": GREEN} and files["contract"]["groups"][0]["C1"] == 0.5
    assert files["contract"]["environment"] == {**NOW, "ahead": False} and files["contract"]["complete"] == sorted(
        STEMS
    )
    out = capsys.readouterr().out
    assert "build        1 green, 0 s" in out and "Fake 1, driver 1" in out and not list(tmp_path.glob("*.partial"))


def test_red_is_exit_code_1_and_the_rest_goes_on(tmp_path, capsys):
    code, files = run(
        tmp_path, part(a=fail, b=lambda: 1 / 0, c=lambda: {"state": UNAVAILABLE, "why": "no tool"}, d=dict)
    )
    assert code == 1 and states(files) == {"a": RED, "b": RED, "c": UNAVAILABLE, "d": GREEN}
    out = capsys.readouterr().out
    assert (
        "RED: 2" in out and "contract: a: y is wrong" in out and "b: ZeroDivisionError" in out and "c: no tool" in out
    )


def test_an_unavailable_tool_is_not_red(tmp_path):
    code, _ = run(tmp_path, part(a=lambda: {"state": UNAVAILABLE, "why": "no compute-sanitizer"}))
    assert code == 0


def test_all_processes_run_the_kernels_that_wait(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    from tfm_kernels.triton import _gemm, _gemm_ahead, _linear_cross_entropy_fwd_ahead, attention_bwd, attention_fwd

    few = (5, 11, 64, True, torch.bfloat16, (9, 0))
    takes = lambda: _gemm.AHEAD and _linear_cross_entropy_fwd_ahead.pick_config(*few) is not None
    modules = attention_fwd, attention_bwd, _gemm
    for module in modules:
        monkeypatch.setattr(module, "AHEAD", False)
    monkeypatch.setattr(_gemm_ahead, "LEAST", _gemm_ahead.LEAST)
    asked = part(a=lambda: {"ahead": [m.AHEAD for m in modules], "least": _gemm_ahead.LEAST, "takes": takes()})
    found = lambda files: [files["contract"]["groups"][0][name] for name in ("ahead", "least", "takes")]
    code, files = run(tmp_path, asked)
    assert code == 0 and found(files) == [[False] * 3, 7, False]
    code, files = run(tmp_path, asked, words=["--ahead"])  # into the same folder, which it does not continue
    assert code == 0 and found(files) == [[True] * 3, 0, True]


@pytest.mark.parametrize(
    "end, how",
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "signal 9"),
        (lambda: os._exit(5), "exit code 5"),
    ],
)
def test_a_process_that_dies_takes_one_item_with_it(tmp_path, end, how):
    code, files = run(tmp_path, part(a=dict, b=end, c=dict))
    assert code == 1 and states(files) == {"a": GREEN, "b": RED, "c": GREEN}
    assert how in files["contract"]["groups"][1]["why"] and files["contract"]["groups"][1]["op"] == "rms_norm"


def test_a_lost_device_gets_a_new_process(tmp_path, monkeypatch):
    monkeypatch.setattr("bench.gpu.part.device_lost", lambda: True)
    pids = [lambda: {"pid": os.getpid()} for _ in range(2)]
    code, files = run(tmp_path, part(a=pids[0], b=fail, c=pids[1]))
    first, wrong, last = files["contract"]["groups"]
    assert code == 1 and wrong["why"] == "y is wrong" and first["pid"] != last["pid"] and DEVICE_LOST != 0


def test_a_part_that_cannot_begin_is_red(tmp_path):
    def broken(room, results):
        raise RuntimeError("no case list")

    code, files = run(tmp_path, Part("contract", "a fake", 1.0, broken), part("speed", a=dict))
    assert code == 1 and states(files) == {"the part contract itself": RED} and states(files, "speed") == {"a": GREEN}


def test_what_waits_for_another_part(tmp_path, capfd):
    """The items that do not wait are run; the part is not finished, and tried again with the time that is left."""

    def not_yet(room, results):
        yield Item("a", dict, stem="layer_norm")
        raise NotYetError("the limits are not measured")

    code, files = run(tmp_path, Part("speed", "a fake", 1.0, not_yet))
    out = capfd.readouterr().out
    assert code == 75 and states(files, "speed") == {"a": GREEN} and "complete" not in files["speed"]
    assert out.count("the limits are not measured") == 2 and "speed        1 green, 0 s; NOT FINISHED" in out


def test_what_ran_out_of_time_has_what_the_others_left(tmp_path):
    """A part that ends before its items do goes on when the parts behind it have needed less than their share."""
    slow = part(**dict.fromkeys("abcd", lambda: time.sleep(0.3) or {}))
    code, files = run(tmp_path, slow, part("speed", 3.0, a=dict), words=["--minutes", "0.05"])
    assert code == 0 and list(states(files)) == ["a", "b", "c", "d"]


def test_an_op_is_complete_when_its_own_items_are(tmp_path):
    items = [
        Item("a", dict, stem="layer_norm"),
        Item("b", dict, stem="ffn"),
        Item("c", lambda: time.sleep(60), stem="ffn"),
    ]
    cut = Part("contract", "a fake", 1.0, lambda room, results: iter(items), patience=2.5)
    code, files = run(tmp_path, Part("contract", "a fake", 1.0, lambda room, results: iter(items[:2])))
    assert code == 0 and files["contract"]["complete"] == sorted(STEMS)
    code, files = run(tmp_path / "cut", cut, words=["--minutes", "0.03"])
    assert code == 1 and states(files) == {"a": GREEN, "b": GREEN, "c": RED}
    assert files["contract"]["complete"] == sorted({*STEMS} - {"ffn"})
    code, files = run(tmp_path / "cut", cut)
    assert code == 1 and files["contract"]["complete"] == sorted(STEMS), "what is red is done"


def test_an_item_that_hangs_costs_its_patience_only(tmp_path):
    hang = [Item("a", dict), Item("b", lambda: time.sleep(60), "rms_norm", backend="cuda"), Item("c", dict)]
    patient = Part("contract", "a fake", 1.0, lambda room, results: iter(hang), patience=0.4)
    start = time.monotonic()
    code, files = run(tmp_path, patient)
    assert code == 1 and states(files) == {"a": GREEN, "b": RED, "c": GREEN} and time.monotonic() - start < 20
    red = files["contract"]["groups"][1]
    assert red["why"].startswith("did not end within") and (red["op"], red["backend"]) == ("rms_norm", "cuda")


def test_a_part_that_runs_only_where_it_is_named(tmp_path):
    extra = Part("sanitizers", "a fake", 1.0, lambda room, results: iter([Item("b", dict)]), named=True)
    _, files = run(tmp_path, part(a=dict), extra)
    assert set(files) == {"contract"}
    _, files = run(tmp_path, part(a=dict), extra, words=["--part", "sanitizers"])
    assert states(files, "sanitizers") == {"b": GREEN}


def test_deadlines_pass_savings_on():
    parts = [part("a", 10.0), part("b", 30.0), part("c", 20.0)]
    assert conductor.deadlines(parts, 120.0) == [20.0, 80.0, 120.0]
    assert conductor.deadlines(parts[2:], 120.0) == [120.0]
    assert sum(one.seconds for one in PARTS if not one.named) == 480 and gpu._options([]).minutes == 8


def test_time_over_and_the_same_command_continues(tmp_path, capsys):
    slow = lambda: time.sleep(0.4) or {}
    never = part(a=slow, b=slow, c=slow, d=slow)
    code, files = run(tmp_path, never, words=["--minutes", "0.01"])
    done = states(files)
    assert code == 75 and 1 <= len(done) < 4 and "complete" not in files["contract"]
    assert "not finished: contract" in capsys.readouterr().out
    code, files = run(tmp_path, never, now={**NOW, "date": "tuesday"})
    assert code == 0 and list(states(files)) == ["a", "b", "c", "d"]
    assert files["contract"]["environment"]["date"] == "monday"
    assert f"continuing contract: {len(done)} items" in capsys.readouterr().out


def test_an_item_that_never_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(conductor, "GRACE", 0.3)
    hang = part(a=dict, b=lambda: time.sleep(60))
    code, files = run(tmp_path, hang, words=["--minutes", "0.005"])
    assert code == 75 and states(files) == {"a": GREEN}, "it was short of time, no more is known"
    monkeypatch.setattr(conductor, "HANGING", 0.1)
    code, files = run(tmp_path, hang, words=["--minutes", "0.005"])
    assert (
        code == 1 and states(files) == {"a": GREEN, "b": RED} and "did not end" in files["contract"]["groups"][1]["why"]
    )


def test_a_driver_that_hangs_or_dies_is_told_of(monkeypatch):
    assert conductor.ask(lambda: {"name": "a GPU"}) == {"name": "a GPU"}
    assert conductor.ask(lambda: os._exit(3)) == {"refusal": "the process that looked for a CUDA device died"}
    monkeypatch.setattr(conductor, "ANSWERS", 0.2)
    answer = conductor.ask(lambda: time.sleep(60))
    assert answer["refusal"].startswith("no answer came for 0.2 seconds")


def test_an_item_that_may_take_longer_is_not_red_where_time_was_short(tmp_path, monkeypatch):
    monkeypatch.setattr(conductor, "GRACE", 0.3)
    monkeypatch.setattr(conductor, "HANGING", 0.1)
    slow = Part("models", "a fake", 1.0, lambda room, results: iter([Item("a", lambda: time.sleep(60))]), patience=30.0)
    code, files = run(tmp_path, slow, words=["--minutes", "0.005"])
    assert code == 75 and states(files, "models") == {}


def test_a_machine_without_the_cpp_extension_says_what_it_times(tmp_path, capsys):
    run(tmp_path, part(a=dict), now={**NOW, "calls": False})
    assert "every call is planned anew: build it first" in capsys.readouterr().out
    run(tmp_path, part(a=dict), now={**NOW, "calls": True})
    assert "planned anew" not in capsys.readouterr().out


@pytest.mark.parametrize("change", [{"sources": "other"}, {"gpu": "Fake 2"}, {"torch": "2.1"}, {"calls": False}])
def test_nothing_is_continued_on_other_ground(tmp_path, change):
    run(tmp_path, part(a=fail))
    code, files = run(tmp_path, part(a=dict), now={**NOW, **change})
    assert code == 0 and states(files) == {"a": GREEN}


def test_fresh_and_part(tmp_path):
    parts = [part("build", a=lambda: {"pid": os.getpid()}), part("contract", b=dict)]
    _, files = run(tmp_path, *parts, words=["--part", "build"])
    assert set(files) == {"build"}
    before = files["build"]["groups"][0]["pid"]
    _, files = run(tmp_path, *parts, words=["--part", "build"])
    assert files["build"]["groups"][0]["pid"] == before
    _, files = run(tmp_path, *parts, words=["--part", "build", "--fresh"])
    assert files["build"]["groups"][0]["pid"] != before


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--part", "tuning"], "--part must be one of environment, build, contract"),
        (["--op", "conv"], "--op must be one of layer_norm, attention, ffn"),
        (["--minutes", "0"], "--minutes must lie above 0 and up to 60, got 0"),
        (["--ahead"], "--ahead needs --out FOLDER"),
        (["--report", "/nonexistent"], "--report must name a folder that holds results, got /nonexistent"),
    ],
)
def test_bad_arguments(words, sentence, capsys):
    assert gpu.main(words) == 1
    err = capsys.readouterr().err
    assert sentence in err and err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_cuda_device(capsys):
    assert gpu.main([]) == 1
    assert capsys.readouterr().err == f"bench.gpu: needs a CUDA device, and torch {torch.__version__} sees none\n"
    assert not torch.cuda.is_initialized()


def test_a_machine_that_cannot_be_read(capsys):
    assert gpu.main([], [part()], lambda: os._exit(3)) == 1
    assert "the process that looked for a CUDA device died" in capsys.readouterr().err


def test_list(capsys):
    assert gpu.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [
        line.split()[0] for line in lines
    ] == "environment build contract repeats memory limits speed models sanitizers".split()
    assert all(line.endswith("only where --part names it") for line in lines[-2:])


def test_what_an_ended_process_started_ends_too(tmp_path, monkeypatch):
    monkeypatch.setattr(conductor, "GRACE", 0.5)
    note = tmp_path / "pid"

    def start():
        process = subprocess.Popen(["sleep", "60"])
        note.write_text(str(process.pid))
        process.wait()

    code, _ = run(tmp_path, part(a=start), words=["--minutes", "0.005"])
    assert code == 75
    status = Path(f"/proc/{note.read_text()}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"


def test_interrupted(tmp_path, monkeypatch, capsys):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "conduct", stop)
    code, _ = run(tmp_path, part(a=dict))
    assert code == 75 and "interrupted; the same command goes on" in capsys.readouterr().err
