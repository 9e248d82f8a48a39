"""What `python -m bench.gpu` finds and how it says it: tools, speeds, refusals, predictions, the table."""

import itertools
import json
import os
import sys
import time
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from subprocess import Popen

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.gpu import __main__ as gpu
from bench.gpu import attention, build, contract, limits, machine, sanitizers, speed, summary, table
from bench.gpu import part as part_module
from bench.gpu.ledger import Ledger
from bench.gpu.part import GREEN, RED, UNAVAILABLE, NotYetError, Part, Room
from bench.gpu.parts import PARTS
from bench.gpu.subjects import STEMS, SUBJECTS
from tests.cases import CASES
from tfm_kernels import _library
from tfm_kernels.bench import measure, record, shapes, timing
from tfm_kernels.bench.ops import attention as bench_attention
from tfm_kernels.bench.ops import layer_norm as bench_layer_norm
from tfm_kernels.bench.subject import Group, groups
from tfm_kernels.testing.contract import FORWARD_ONLY

NOW = {
    "protocol": 1, "device": "fake", "gpu": "Fake 1", "driver": "1", "torch": "2", "triton": "3", "nvcc": "13.0",
    "sources": "abc", "date": "monday",
}  # fmt: skip
NORMS = next(subject for subject in SUBJECTS if subject.stem == "layer_norm")
SPEED = next(one for one in PARTS if one.name == "speed")


def work(part, room):
    """A part in this process alone."""
    ledger = Ledger(part.name, room.results(part.name), [subject.stem for subject in room.subjects], 1, print)
    part_module.work(part, room, lambda message: ledger.take(0, message) or ledger.write())


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
    assert build.Extensions(room).end() == {"state": UNAVAILABLE, "why": "no C++ compiler: c++ is not found"}
    assert sanitizers.sanitize("memcheck", NORMS, room)["why"] == "compute-sanitizer is not found"


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
    room = Room(tmp_path, NOW, time.monotonic() + 9)
    assert sanitizers.sanitize("memcheck", NORMS, room).get("state", GREEN) == state
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    late = sanitizers.sanitize("memcheck", NORMS, replace(room, deadline=time.monotonic() + 1))
    assert late["state"] == UNAVAILABLE and late["unfinished"], "the next run tries again"


def proven(room, contract, stems=STEMS):
    """Files of a proof whose contract holds items: (backend, op) -> state; of the norms, and of all for those stems."""
    for (backend, op), state in contract.items():
        why = {"why": "C1 broken"} if state == RED else {"C1": 0.25, "dtype": "bf16"}
        named = {"key": f"{backend} {op}-1", "op": op, "stem": "layer_norm", "backend": backend}
        room.results("contract").add({**named, "state": state, **why})
    results = room.results("contract")
    results.data["complete"] = list(stems)
    results.write()
    names = [f"copy {size}" for size in limits.COPY_BYTES] + [f"matrix {dtype}" for dtype in limits.MATRIX]
    for name in names:
        room.results("limits").add({"key": name, "op": "", "state": GREEN, "rate": 4e12, "seconds": 0.1})


def test_what_is_red_gets_no_speed(tmp_path, monkeypatch):
    """Of an op that one backend has wrong the others are timed; a backend whose race was found has no op timed."""
    timed = {}
    monkeypatch.setattr(speed, "launch_cost", lambda *_: {})
    monkeypatch.setattr(speed, "_measure", lambda group, *rest: timed.update({group.case.op: rest[-1]}) or {})
    room = Room(tmp_path, NOW, time.monotonic() + 60, SUBJECTS)
    work(SPEED, room)
    assert room.results("speed").data["groups"] == [], "nothing is timed before the limits and the contract"
    both = ("triton", "cuda")
    contract_ = {(backend, op): GREEN for backend in both for op in ("layer_norm", "add_layer_norm", "add_rms_norm")}
    contract_ |= {("cuda", "layer_norm"): RED, **{(backend, "add_rms_norm"): RED for backend in both}}
    proven(room, contract_)
    race = {"key": "triton ffn racecheck", "op": "", "stem": "ffn", "backend": "triton"}
    room.results("sanitizers").add({**race, "state": RED, "why": "a hazard"})
    work(SPEED, room)
    because = "not timed, because contract: "
    assert timed == {"layer_norm": {"cuda": f"{because}cuda layer_norm-1 is red"}, "add_layer_norm": {}}
    found = {item["key"]: item for item in room.results("speed").data["groups"]}
    refused = {item["op"]: item["why"] for item in found.values() if item["state"] == UNAVAILABLE}
    alone = ("linear_cross_entropy", "rotary", "int8_linear", "int8_ffn")
    has = {op: both if op not in alone else ("triton",) for op in refused}
    no_case = {op: "; ".join(f"{because}there is no case of {op} on {b}" for b in has[op]) for op in refused}
    assert refused == {
        **no_case,
        "add_rms_norm": f"{because}triton add_rms_norm-1 is red; {because}cuda add_rms_norm-1 is red",
        "ffn": f"not timed, because sanitizers: triton ffn racecheck is red; {because}there is no case of ffn on cuda",
    }
    assert {"rms_norm", "attention", "attention_varlen"} < set(refused)
    assert not any("rows" in item for item in found.values() if item["state"] == UNAVAILABLE)
    assert set(room.results("speed").data["predicted"]) == {
        group.key for subject in SUBJECTS for group in groups(subject.speed)
    }


def test_the_headlines_of_what_is_proven_are_timed_first(tmp_path, monkeypatch):
    timed = []
    monkeypatch.setattr(speed, "launch_cost", lambda *_: {})
    monkeypatch.setattr(speed, "_measure", lambda group, *_: timed.append(group) or {})
    room = Room(tmp_path, NOW, time.monotonic() + 60, SUBJECTS)
    ops = ("layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm")
    proven(room, {("triton", op): GREEN for op in ops}, stems=["layer_norm"])
    work(SPEED, room)
    assert {group.case.op for group in timed} == set(ops), "attention and ffn wait for their contract"
    headlines = [group.case.headline for group in timed]
    assert headlines == sorted(headlines, reverse=True) and any(headlines) and not all(headlines)
    assert not room.finished("speed")


def test_predictions_are_written_before_they_are_measured(tmp_path, monkeypatch):
    room = Room(tmp_path, NOW, time.monotonic() + 60, SUBJECTS)
    proven(room, {("triton", op): GREEN for op in ("layer_norm", "add_layer_norm")})
    seen = []
    monkeypatch.setattr(speed, "launch_cost", lambda *_: {})
    monkeypatch.setattr(speed, "_measure", lambda group, *_: seen.append(room.results("speed").data["predicted"]) or {})
    work(SPEED, room)
    assert seen and all(len(written) == len(seen[-1]) for written in seen)
    floor = 4 * 8192 * 1024 * 2 / 4e12
    expected = seen[0]["add_layer_norm M8192 N1024 dropout 0.1 bfloat16 infer"]["forward"]
    assert floor < expected < 1.3 * floor


def row(implementation, median, direction="forward"):
    return {
        "direction": direction, "implementation": implementation, "median": median, "p20": median, "p80": median,
        "rounds": 9, "ratio": 1.0, "flops": 1, "bytes": 10**6, "limit": 8e-6, "bound": "copy", "predicted": 9e-6,
    }  # fmt: skip


def test_readmes_table_names_the_fastest_that_pytorch_has():
    group = {
        "op": "attention", "label": "T512", "dtype": "bfloat16", "headline": True, "chosen": "triton",
        "rows": [row("torch", 2e-5), row("cudnn", 1.5e-5), row("auto", 1e-5), row("aten", 9e-6), row("cuda", 3e-5)],
    }  # fmt: skip
    both = {**group, "chosen": "aten", "rows": [row("torch", 2e-5, "both"), row("triton", 4e-5, "both")]}
    others = [{**group, "headline": False}, {**group, "rows": [row("torch", 1e-5)]}]
    text = summary.markdown({"speed": {"environment": NOW, "groups": [group, both, *others]}})
    assert text.splitlines()[4:] == [
        "| `attention` | T512 | bfloat16 | forward | 10 | 15 (cudnn) | 1.50x | 80% |",
        "| `attention` | T512 | bfloat16 | with backward | 40 | 20 (torch) | 0.50x | 20% |",
    ]
    told = summary.ranges({"speed": {"environment": NOW, "groups": [group, both, {**both, "op": "ffn"}, *others]}})
    assert told.splitlines() == ["| GPU | `attention` | `ffn` |", "|---|---:|---:|",
                                 f"| {NOW['gpu']} | 1.50; 0.50 | 0.50 |"]  # fmt: skip
    assert "Nothing is measured" in summary.markdown({}) and "Nothing is measured" in summary.ranges({})


def test_table_of_a_recorded_example(tmp_path, capsys):
    group = {
        "key": "layer_norm M8192 N1024 bfloat16 infer", "op": "layer_norm", "label": "M8192 N1024", "chosen": "aten",
        "dtype": "bfloat16", "state": GREEN, "seconds": 2.0,
        "rows": [
            row("torch", 2e-5), row("auto", 2.1e-5), row("flash", 1.2e-5), row("torch.compile", 1.5e-5),
            row("triton", 1e-5),
        ],
    }  # fmt: skip
    cases = [
        {"key": str(ratio), "op": "layer_norm", "state": GREEN, "dtype": "bf16", "C1": ratio} for ratio in (0.3, 0.71)
    ]
    for name in (one.name for one in PARTS):
        results = record.Results(tmp_path / f"{name}.json", NOW)
        results.data |= {"groups": {"speed": [group], "contract": cases}.get(name, []), "complete": list(STEMS)}
        results.write()
    (tmp_path / "layer_norm.json").write_text("{}")  # another program's file
    assert gpu.main(["--report", str(tmp_path)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("layer_norm"))
    assert line.split() == "layer_norm M8192 N1024 bf16 forward 10.0 9.0 20.0 12.0 15.0 21.0 1.20x 80% 0.71".split()
    assert table.error({}, "layer_norm", "bfloat16") is None


@pytest.mark.parametrize("kind", shapes.PASSES)
def test_a_group_is_timed_on_the_device(kind, monkeypatch):
    """All of it but the device: a clock of ours in place of CUDA's events."""
    clock = iter(range(1, 1000))
    monkeypatch.setattr(limits, "Flush", lambda device: "flush")
    monkeypatch.setattr(limits, "timed", lambda call, flush, host: call() or next(clock) * 1e-6)
    monkeypatch.setattr(speed.DeviceRunner, "peak_memory", lambda self: 1)
    monkeypatch.setattr(speed, "PLAN", timing.Plan(seconds=0.0, least=2, most=2))
    monkeypatch.setattr(machine, "clocks", dict)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    group = Group(bench_layer_norm.SUBJECT, shapes.Norm(op="add_rms_norm", rows=4, features=8), "float32", kind)
    predicted = {group.key: dict.fromkeys(group.directions, 1e-6)}
    peak = {"copy": {"1": 1e12}, "matrix": {"float32": 1e12}}
    found = speed._measure(group, peak, predicted, "cpu", {})
    rows = {(row["implementation"], row["direction"]): row for row in found["rows"]}
    assert {direction for _, direction in rows} == set(group.directions) and "state" not in found
    for row in rows.values():
        assert row["predicted"] == 1e-6 and row["rounds"] == 2 and row["limit"] == pytest.approx(row["bytes"] / 1e12)
    if kind == "train":
        assert all(rows[name, "both"]["median"] > rows[name, "backward"]["median"] for name, _ in rows)
    barred = speed._measure(group, peak, predicted, "cpu", {"cpu": "it is red"})
    assert barred["chosen"] == "cpu" and barred["unavailable"]["auto"] == "it is red" and "state" not in barred
    assert {row["implementation"] for row in barred["rows"]} == {"torch", "aten"}
    monkeypatch.setattr(measure.gate, "refusal", lambda *_: "y: C1 broken")
    found = speed._measure(group, peak, predicted, "cpu", {})
    assert (
        found["state"] == RED
        and "C1 broken" in found["why"]
        and {r["implementation"] for r in found["rows"]} == {"torch"}
    )


@pytest.mark.parametrize("kind", shapes.PASSES)
def test_each_kernel_of_sdpa_is_timed_alone(kind):
    """On the CPU PyTorch has two of the four; what the others say is kept."""
    subject = replace(bench_attention.SUBJECT, rivals=attention.sdpa_kernels)
    group = Group(subject, shapes.Attention(batch=2, heads=2, queries=16, dim=8), "float32", kind)
    peak = {"copy": {"1": 1e12}, "matrix": {"float32": 1e12}}
    found = measure.measure(group, timing.Plan(seconds=0.0, least=2, most=2), peak)
    timed = {row["implementation"] for row in found["rows"]}
    assert timed & set(attention.SDPA) == {"flash", "math"} and timed >= {"torch", "auto"}
    assert all("RuntimeError: No " in found["unavailable"][name] for name in ("efficient", "cudnn"))


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("end", ["dies", "fails"])
def test_compiling_processes(tmp_path, monkeypatch, end):
    """Calls are shared out; a call that fails is named, a process that dies is missed."""
    ways = {"dies": partial(os._exit, 3), "fails": partial(int, "x"), "green": dict}
    room = Room(tmp_path, NOW, time.monotonic() + 60)
    calls = lambda *names: lambda subject, device: [(name, ways[name]) for name in names]
    monkeypatch.setattr(build, "calls", calls("green", end, "green"))
    found = build.compile_all(SUBJECTS[0], room, processes=3)
    assert found["state"] == RED and len(found["failures"]) == 1
    assert ("1 of 3 compiling processes died" if end == "dies" else "fails: ValueError") in found["why"]
    monkeypatch.setattr(build, "calls", calls("green", "green"))
    assert build.compile_all(SUBJECTS[0], room, processes=2)["state"] == GREEN


def test_the_extensions_are_built_beside_the_rest(tmp_path, monkeypatch):
    """They begin with the first Triton op; what ran out of time is tried again, and nothing is judged before."""
    room = Room(tmp_path, NOW, time.monotonic() + 60, SUBJECTS)
    begun = []
    monkeypatch.setattr(build, "compile_all", lambda *_: {"begun": len(begun)})
    monkeypatch.setattr(build, "cuda_extension", dict)
    monkeypatch.setattr(build.Extensions, "begin", lambda self: begun.append(self))
    part = Part("build", "", 1.0, build.items)
    monkeypatch.setattr(build.Extensions, "end", lambda self: {"state": UNAVAILABLE, "why": "late", "unfinished": True})
    work(part, room)
    found = {item["key"]: item for item in room.results("build").data["groups"]}
    assert [found[f"triton {stem}"]["begun"] for stem in STEMS] == [*range(1, 8)] and len(set(begun)) == 1
    assert not room.finished("build")
    monkeypatch.setattr(_library, "cuda_extension", None)
    ready = []
    with pytest.raises(NotYetError, match="the extensions are not built"):
        for item in contract.items(room, room.results("contract")):
            ready.append(item.backend)
    assert set(ready) == {"triton"}
    monkeypatch.setattr(build.Extensions, "end", lambda self: {})
    work(part, room)
    assert [item["state"] for item in room.results("build").data["groups"]] == [GREEN] * 9
    assert room.finished("build") and tuple(room.built()) == SUBJECTS


def test_extensions_that_take_too_long(tmp_path, monkeypatch):
    sleeps = lambda *args, **kwargs: Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr(build.subprocess, "Popen", sleeps)
    found = build.Extensions(Room(tmp_path, NOW, time.monotonic())).end()
    assert found["state"] == UNAVAILABLE and found["unfinished"] and "before the part had to end" in found["why"]


def test_files_are_written_as_json_writes_them(tmp_path):
    """Groups are encoded once each; the bytes are those of one call, and a group that is replaced is written anew."""
    path = tmp_path / "contract.json"
    results = record.Results(path, NOW)
    results.write()
    assert path.read_text() == json.dumps(results.data, indent=1) + "\n"
    for key, words in (("a", 'say "groups": []'), ("b", "two\nlines"), ("a", "again")):
        results.data["more"] = {"of": words}
        results.add({"key": key, "why": words, "rows": [1, {"x": None}]})
        assert path.read_text() == json.dumps(results.data, indent=1) + "\n"
    assert [group["why"] for group in record.Results(path, NOW).data["groups"]] == ["two\nlines", "again"]


def speed_groups():
    found = {group.key: (subject, group) for subject in SUBJECTS for group in groups(subject.speed)}
    return [pytest.param(*both, id=key) for key, both in found.items() if both[1].kind == "infer"]


@pytest.mark.parametrize("subject, group", speed_groups())
def test_peers_run_where_the_arguments_are(subject, group):
    """On tensors of a GPU that is not there, whose operators refuse any other device."""
    with FakeTensorMode():
        case = subject.speed.proof(group.case)
        given = {
            name: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="cuda") if torch.is_tensor(t) else t
            for name, t in subject.speed.arguments(case, group.dtype).items()
        }
        function, leaves = subject.speed.eager(case, given)
        result = function(**leaves)
    results = result if isinstance(result, tuple) else (result,)
    assert {t.device.type for t in (*leaves.values(), *results)} == {"cuda"}


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_each_kernel_is_compiled_by_one_process(tmp_path):
    from tfm_kernels.triton.layer_norm_fwd import layer_norm_fwd_kernel as kernel

    given = {"x_ptr": torch.ones(2), "residual_ptr": None, "M": 5, "eps": 1e-5, "BLOCK_N": 64, "num_warps": 4}
    assert build.claim(tmp_path, kernel, given)
    same = {"x_ptr": torch.ones(3), "M": 7, "eps": 0.5}
    assert not build.claim(tmp_path, kernel, {**given, **same})
    others = {"x_ptr": torch.ones(2).half(), "residual_ptr": torch.ones(2), "BLOCK_N": 128, "num_warps": 8}
    assert all(build.claim(tmp_path, kernel, {**given, name: value}) for name, value in others.items())


def pairs(cases):
    """Every pair of levels that a case has."""
    levels = [sorted((name, repr(level)) for name, level in case.levels.items()) for case in cases]
    return {pair for found in levels for pair in itertools.combinations(found, 2)}


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: f"{subject.stem}-{subject.backend}")
def test_subjects(subject):
    """What an op declares is complete: keys are unique, every public op is judged, timed and has its branch."""
    cases = subject.cases()
    assert len({case.id for case in cases}) == len(cases)
    ours = [case for case in CASES if case.op in {case.op for case in cases} and case.levels["dtype"] != "f64"]
    assert len(ours) >= 90 or subject.stem in FORWARD_ONLY, "of these alone the proof has a list of its own"
    assert pairs(ours) <= pairs(cases), "a pair of levels that no case of the proof has"
    timed = {case.op for case in subject.speed.cases}
    assert timed <= {case.op for case in cases} and "f64" not in {case.levels["dtype"] for case in cases}
    keys = [group.key for group in groups(subject.speed)]
    assert len(set(keys)) == len(keys)
    assert {name.split()[0] for name in (*subject.checks, *subject.large)} <= timed
    for name, (op, inputs) in subject.branches("cpu").items():
        assert name.startswith(op) and inputs


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_norms_cases_reach_every_launch():
    from tfm_kernels.triton import layer_norm_bwd, layer_norm_fwd

    def launches(width, rows, aligned):
        backward = layer_norm_bwd.pick_config(rows, width, aligned, (9, 0))
        return layer_norm_fwd.pick_config(width, aligned, torch.bfloat16), backward, width > backward.block_n

    every = {launches(width, 10**6, aligned) for width in range(1, 65537, 3) for aligned in (width % 8 == 0, False)}
    cases = [case.levels for case in NORMS.cases() if case.levels["layout"] == "contiguous"]
    reached = {launches(c["width"], torch.Size(c["rows"]).numel(), c["width"] % 8 == 0) for c in cases}
    assert every <= reached, "a launch that no case of the proof makes"
