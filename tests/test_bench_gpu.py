"""`python -m bench.gpu` as far as it goes without a GPU: arguments, processes, time, resuming, refusals, the table."""

import json
import os
import signal
import time

import pytest
import torch

from bench import record
from bench.gpu import __main__ as gpu
from bench.gpu import build, conductor, limits, machine, memory, speed, table
from bench.gpu.part import DEVICE_LOST, GREEN, RED, UNAVAILABLE, Item, NotYetError, Part, Room, work
from bench.gpu.parts import PARTS
from bench.gpu.subjects import SUBJECTS
from bench.subject import groups

NOW = {
    "protocol": 1, "device": "fake", "gpu": "Fake 1", "driver": "1", "torch": "2", "triton": "3", "nvcc": "13.0",
    "sources": "abc", "date": "monday",
}  # fmt: skip
STEMS = [subject.stem for subject in SUBJECTS]


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
    assert files["contract"]["environment"] == NOW and files["contract"]["complete"] == STEMS
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
    assert how in files["contract"]["groups"][1]["why"] and "running" not in files["contract"]


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


def test_a_part_waits_for_what_it_builds_on(tmp_path, capfd):
    def not_yet(room, results):
        yield Item("a", dict)
        raise NotYetError("the limits are not measured")

    code, files = run(tmp_path, Part("speed", "a fake", 1.0, not_yet))
    assert code == 75 and files["speed"]["groups"] == [] and "the limits are not measured" in capfd.readouterr().out


def test_deadlines_pass_savings_on():
    parts = [part("a", 10.0), part("b", 30.0), part("c", 20.0)]
    assert conductor.deadlines(parts, 120.0) == [20.0, 80.0, 120.0]
    assert conductor.deadlines(parts[2:], 120.0) == [120.0]
    assert sum(one.seconds for one in PARTS) == 480 and gpu._options([]).minutes == 8


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


@pytest.mark.parametrize("change", [{"sources": "other"}, {"gpu": "Fake 2"}, {"torch": "2.1"}])
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
        (["--op", "conv"], "--op must be one of layer_norm"),
        (["--minutes", "0"], "--minutes must lie above 0 and up to 60, got 0"),
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
    assert [line.split()[0] for line in lines] == "environment build contract repeats memory limits speed".split()


def test_words_of_the_machine(monkeypatch):
    assert machine.slug("NVIDIA H200") == "h200" and machine.slug("NVIDIA A100-SXM4-80GB") == "a100-sxm4-80gb"
    answers = {"nvidia-smi": "580.1, 3201 MHz", "nvcc": "Cuda compilation tools, release 13.0, V13.0.88"}
    monkeypatch.setattr(machine, "output", lambda *command, **_: answers[command[0]])
    assert machine.query("driver_version", "clocks.mem") == {"driver_version": "580.1", "clocks.mem": "3201 MHz"}
    assert machine.query("driver_version") == {"driver_version": "unknown"} and machine.nvcc() == "13.0"


def test_outside_of_git(monkeypatch):
    assert machine.output("no-such-program") == "" and machine.package("no-such-package") is None
    monkeypatch.setenv("PATH", "")
    assert record.git("rev-parse", "HEAD") == "unknown"
    where = SUBJECTS[0].cases  # the sources' digest covers the case list's file
    assert where and record.sources(machine.SOURCES) != record.sources(machine.SOURCES[:-1])


def test_no_compiler_and_no_sanitizer_are_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    room = Room(tmp_path, NOW, time.monotonic() + 9)
    assert build.cpu_extension(room) == {"state": UNAVAILABLE, "why": "no C++ compiler: c++ is not found"}
    assert memory.sanitize("memcheck", "layer_norm", room)["why"] == "compute-sanitizer is not found"


@pytest.mark.parametrize(
    "words, code, state",
    [
        ("ran every branch", 0, GREEN),
        ("Invalid __global__ write", 9, RED),
        ("Error: Device not supported", 1, UNAVAILABLE),
    ],
)
def test_what_a_sanitizer_says(monkeypatch, tmp_path, words, code, state):
    program = tmp_path / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\necho '{words}'\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = memory.sanitize("memcheck", "layer_norm", Room(tmp_path, NOW, time.monotonic() + 9))
    assert found.get("state", GREEN) == state


def proven(room, **contract):
    """Files of a proof whose contract holds items by key -> (op, state)."""
    for key, (op, state) in contract.items():
        why = {"why": "C1 broken"} if state == RED else {"C1": 0.25, "dtype": "bf16"}
        record.Results(room.folder / "contract.json", NOW).add({"key": key, "op": op, "state": state, **why})
    results = room.results("contract")
    results.data["complete"] = STEMS
    results.write()
    names = [f"copy {size}" for size in limits.COPY_BYTES] + [f"matrix {dtype}" for dtype in limits.MATRIX]
    for name in names:
        room.results("limits").add({"key": name, "op": "", "state": GREEN, "rate": 4e12, "seconds": 0.1})


def test_a_red_contract_gets_no_speed(tmp_path, monkeypatch):
    timed = []
    monkeypatch.setattr(speed, "launch_cost", lambda *_: {})
    monkeypatch.setattr(speed, "_measure", lambda group, *_: timed.append(group.case.op) or {})
    room = Room(tmp_path, NOW, time.monotonic() + 60, SUBJECTS)
    speeds = next(one for one in PARTS if one.name == "speed")
    work(speeds, room)
    assert room.results("speed").data["groups"] == [], "nothing is timed before the limits and the contract"
    ops = {name: (name, GREEN) for name in ("layer_norm", "add_layer_norm", "add_rms_norm")}
    proven(room, **ops, other=("add_layer_norm", RED))
    work(speeds, room)
    assert set(timed) == {"layer_norm", "add_rms_norm"}
    found = {item["key"]: item for item in room.results("speed").data["groups"]}
    refused = {item["op"]: item["why"] for item in found.values() if item["state"] == UNAVAILABLE}
    assert refused == {
        "add_layer_norm": "not timed, because contract: other is red",
        "rms_norm": "not timed, because contract: there is no case of rms_norm",
    }
    assert not any("rows" in item for item in found.values() if item["state"] == UNAVAILABLE)
    assert set(room.results("speed").data["predicted"]) == {
        group.key for subject in SUBJECTS for group in groups(subject.speed)
    }


def test_predictions_are_written_before_they_are_measured(tmp_path, monkeypatch):
    room = Room(tmp_path, NOW, time.monotonic() + 60, SUBJECTS)
    proven(room, a=("layer_norm", GREEN))
    seen = []
    monkeypatch.setattr(speed, "launch_cost", lambda *_: {})
    monkeypatch.setattr(speed, "_measure", lambda group, *_: seen.append(room.results("speed").data["predicted"]) or {})
    work(next(one for one in PARTS if one.name == "speed"), room)
    assert seen and all(len(written) == len(seen[-1]) for written in seen)
    floor = 4 * 8192 * 1024 * 2 / 4e12
    expected = seen[0]["add_layer_norm M8192 N1024 dropout 0.1 bfloat16 infer"]["forward"]
    assert floor < expected < 1.3 * floor


def row(implementation, median, direction="forward"):
    return {
        "direction": direction, "implementation": implementation, "median": median, "p20": median, "p80": median,
        "rounds": 9, "ratio": 1.0, "flops": 1, "bytes": 10**6, "limit": 8e-6, "bound": "copy", "predicted": 9e-6,
    }  # fmt: skip


def test_table_of_a_recorded_example(tmp_path, capsys):
    group = {
        "key": "layer_norm M8192 N1024 bfloat16 infer", "op": "layer_norm", "label": "M8192 N1024", "chosen": "aten",
        "dtype": "bfloat16", "state": GREEN, "seconds": 2.0,
        "rows": [row("torch", 2e-5), row("auto", 2.1e-5), row("torch.compile", 1.5e-5), row("triton", 1e-5)],
    }  # fmt: skip
    cases = [
        {"key": str(ratio), "op": "layer_norm", "state": GREEN, "dtype": "bf16", "C1": ratio} for ratio in (0.3, 0.71)
    ]
    for name in (one.name for one in PARTS):
        results = record.Results(tmp_path / f"{name}.json", NOW)
        results.data |= {"groups": {"speed": [group], "contract": cases}.get(name, []), "complete": STEMS}
        results.write()
    (tmp_path / "layer_norm.json").write_text("{}")  # another program's file
    assert gpu.main(["--report", str(tmp_path)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("layer_norm"))
    assert line.split() == "layer_norm M8192 N1024 bf16 forward 10.0 9.0 20.0 15.0 21.0 1.50x 80% 0.71".split()
    assert table.error({}, "layer_norm", "bfloat16") is None


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.stem)
def test_subjects(subject):
    """What an op declares is complete: keys are unique, every public op is judged, timed and has its branch."""
    cases = subject.cases()
    assert len({case.id for case in cases}) == len(cases) and len(cases) >= 100
    timed = {case.op for case in subject.speed.cases}
    assert timed <= {case.op for case in cases} and "f64" not in {case.levels["dtype"] for case in cases}
    keys = [group.key for group in groups(subject.speed)]
    assert len(set(keys)) == len(keys)
    assert {name.split()[0] for name in (*subject.checks, *subject.large)} <= timed
    for name, (op, inputs) in subject.branches("cpu").items():
        assert name.startswith(op) and inputs
