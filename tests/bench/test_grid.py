"""The bench's own promises: right counts, no number for a wrong kernel, honest reports, a README that is up to date."""

import json
import math
import re

import pytest
import torch

import tfm_kernels as tfk
from bench import __main__ as door
from bench import places, readme
from bench import report as tables
from tfm_kernels import Mask, _backend
from tfm_kernels.bench import gate, grid, limits, measure, record, report, shapes, timing
from tfm_kernels.bench.ops import (
    attention,
    ffn,
    int8_ffn,
    int8_linear,
    layer_norm,
    linear,
    linear_cross_entropy,
    rotary,
)
from tfm_kernels.bench.shapes import Attention, Ffn, Int8Ffn, Int8Linear, Linear, LinearCrossEntropy, Norm, Rotary
from tfm_kernels.bench.subject import BACKWARD, BOTH, DIRECTIONS, FORWARD, Group, groups

TINY = timing.Plan(seconds=0.0, least=2, most=2)
MACHINE = {"copy": {"16384": 4e9, "1048576": 2e9}, "matrix": {"float32": 1e11, "bfloat16": 4e10, "float16": 2e11}}


@pytest.mark.parametrize("stem", shapes.GRID)
def test_grid(stem):
    cases = shapes.GRID[stem]
    keys = [group.key for group in groups(grid.SUBJECTS[stem])]
    assert len(keys) == len(set(keys)), "two groups of one name"
    assert any(case.quick for case in cases) and any(case.headline for case in cases)
    for case in cases:
        assert case.op in _backend.OPS and json.loads(json.dumps(case.data()))["op"] == case.op
        proof = grid.SUBJECTS[stem].proof(case)
        assert type(proof) is type(case) and proof.op == case.op


def test_every_op_is_measured():
    front = {"scaled_dot_product_attention"}  # attention under torch's signature
    assert {case.op for cases in shapes.GRID.values() for case in cases} == set(_backend.OPS) - front


@pytest.mark.parametrize(
    "case",
    [
        Attention(batch=3, queries=7, keys=5, causal=True),
        Attention(batch=3, queries=4, keys=9, causal=True, padded=True),
        Attention(batch=4, queries=9, padded=True),
    ],
    ids=lambda case: case.label,
)
def test_visible_pairs_are_those_of_the_mask(case):
    mask = Mask.lengths(torch.tensor(case.lengths))
    mask = mask & Mask.causal() if case.causal else mask
    assert attention.visible(case) == int(mask.dense(case.batch, 1, case.queries, case.kv_length).sum())


def test_flops_and_bytes():
    q = Attention(batch=2, heads=4, key_heads=2, queries=8, dim=16)
    assert attention.flops(q, FORWARD) == 4 * 2 * 4 * 8 * 8 * 16
    assert attention.flops(q, BACKWARD) == 10 * 2 * 4 * 8 * 8 * 16
    assert attention.bytes_moved(q, 2, FORWARD) == 2 * 2 * 8 * 16 * (4 + 4 + 2 + 2)
    packed = Attention(op="attention_varlen", packed=True, batch=2, queries=8, causal=True)
    assert packed.lengths == [4, 8] and attention.visible(packed) == 10 + 36
    f = Ffn(rows=3, width=8, hidden=32)
    assert ffn.flops(f, FORWARD) == 4 * 3 * 8 * 32 and ffn.flops(f, BOTH) == 12 * 3 * 8 * 32
    assert ffn.flops(Ffn(rows=3, width=8, hidden=32, gated=True), FORWARD) == 6 * 3 * 8 * 32
    assert ffn.bytes_moved(f, 4, FORWARD) == 4 * (2 * 3 * 8 + 2 * 8 * 32)
    lin = Linear(rows=3, width=8, out=5)
    assert linear.flops(lin, FORWARD) == 240 and linear.bytes_moved(lin, 2, FORWARD) == 2 * (24 + 40 + 15)
    narrow = Int8Ffn(rows=3, width=8, hidden=32, gated=True)
    assert int8_ffn.flops(narrow, FORWARD) == 6 * 3 * 8 * 32
    assert int8_ffn.bytes_moved(narrow, 4, FORWARD) == 4 * 2 * 3 * 8 + 3 * 8 * 32
    short = Int8Linear(rows=3, width=8, out=5)
    assert int8_linear.flops(short, FORWARD) == 240
    assert int8_linear.bytes_moved(short, 2, FORWARD) == 2 * (24 + 15) + 40
    loss = LinearCrossEntropy(rows=10, width=8, classes=5, ignored=0.4)
    assert [linear_cross_entropy.flops(loss, d) for d in DIRECTIONS] == [480, 960, 1440]
    assert [linear_cross_entropy.bytes_moved(loss, 2, d) for d in DIRECTIONS] == [176, 352, 528]
    turned = Rotary(batch=2, heads=3, length=5, dim=8)
    assert [rotary.flops(turned, d) for d in DIRECTIONS] == [720, 720, 1440]
    assert [rotary.bytes_moved(turned, 2, d) for d in DIRECTIONS] == [1120, 1120, 2240]
    n = Norm(rows=3, features=8)
    assert [layer_norm.bytes_moved(n, 2, d) for d in DIRECTIONS] == [96, 144, 240]
    assert layer_norm.bytes_moved(Norm(op="add_rms_norm", rows=3, features=8), 4, FORWARD) == 4 * 4 * 24


def test_limits():
    assert limits.copy_rate(MACHINE, 1) == 4e9 and limits.copy_rate(MACHINE, 1 << 30) == 2e9
    assert limits.copy_rate(MACHINE, 1 << 17) == pytest.approx(3e9)  # halfway on the logarithmic scale
    assert limits.matrix_rate(MACHINE, "bfloat16") == 1e11, "widening to float32 is a way too"
    assert limits.least_time(MACHINE, "float32", 10**9, 4) == 0.01
    assert limits.bound_by(MACHINE, "float32", 10**9, 4) == "matrix"
    assert limits.bound_by(MACHINE, "float32", 1, 1 << 20) == "copy"
    found = limits.measure(("float32",), seconds=0.0)
    assert all(rate > 0 for part in found.values() for rate in part.values())


def test_statistics():
    spread = timing.spread([5.0, 1.0, 3.0, 2.0, 4.0, 6.0])
    assert (spread.p20, spread.median, spread.p80, spread.rounds) == (2.0, 3.5, 5.0, 6)
    slow_minutes = [1.0, 10.0, 1.0, 10.0, 1.0]
    assert timing.paired_ratio([2 * t for t in slow_minutes], slow_minutes) == 2.0
    calls = []
    taken = timing.interleave({name: lambda name=name: calls.append(name) or (1.0,) for name in "abc"}, TINY)
    assert {name: len(samples) for name, samples in taken.items()} == {"a": 2, "b": 2, "c": 2}
    assert sorted(calls[:3]) == sorted(calls[3:]) == ["a", "b", "c"], "each round runs each once"


@pytest.mark.parametrize("kind", shapes.PASSES)
@pytest.mark.parametrize(
    "subject, case",
    [
        (layer_norm.SUBJECT, Norm(op="add_layer_norm", rows=4, features=8)),
        (attention.SUBJECT, Attention(batch=2, heads=2, queries=8, dim=8, padded=True, causal=True)),
        (attention.SUBJECT, Attention(batch=2, heads=4, key_heads=2, queries=8, dim=8, bias=True)),
        (attention.SUBJECT, Attention(op="attention_varlen", packed=True, batch=2, heads=2, queries=8, dim=8)),
        (ffn.SUBJECT, Ffn(rows=4, width=8, hidden=16, activation="silu", gated=True)),
        (linear_cross_entropy.SUBJECT, LinearCrossEntropy(rows=6, width=8, classes=5, ignored=0.3)),
        (rotary.SUBJECT, Rotary(batch=2, heads=3, length=5, dim=8)),
    ],
    ids=lambda value: getattr(value, "label", ""),
)
def test_a_group_is_measured(subject, case, kind):
    group = Group(subject, case, "float32", kind)
    found = measure.measure(group, TINY, MACHINE)
    assert found["chosen"] in _backend.BACKENDS and not found["refused"]
    assert {row["direction"] for row in found["rows"]} == set(group.directions)
    assert {"torch", "auto"} <= {row["implementation"] for row in found["rows"]}
    assert found["memory"]["auto"] > 0 and json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    "subject, case",
    [
        (int8_linear.SUBJECT, Int8Linear(rows=6, width=8, out=5)),
        (int8_linear.SUBJECT, Int8Linear(rows=6, width=8, out=5, dynamic=True)),
        (int8_ffn.SUBJECT, Int8Ffn(rows=6, width=8, hidden=16)),
        (int8_ffn.SUBJECT, Int8Ffn(rows=6, width=8, hidden=16, activation="silu", gated=True)),
    ],
    ids=lambda value: getattr(value, "label", ""),
)
def test_int8_is_measured_beside_layers_of_floats(subject, case):
    found = measure.measure(Group(subject, case, "bfloat16", "infer"), TINY, MACHINE)
    assert not found["refused"] and found["chosen"] == "cpu"
    assert {row["implementation"] for row in found["rows"]} == {"torch", "aten", "auto"}


@pytest.fixture(params=[1.01])
def scaled(request, monkeypatch):
    right = tfk.ops.rms_norm
    monkeypatch.setattr(tfk.ops, "rms_norm", lambda *args, **kwargs: request.param * right(*args, **kwargs))
    gate._contract.cache_clear()
    yield
    gate._contract.cache_clear()


@pytest.mark.parametrize("kind", shapes.PASSES)
def test_a_wrong_kernel_gets_no_number(scaled, kind):
    group = Group(layer_norm.SUBJECT, Norm(op="rms_norm", rows=64, features=128), "float32", kind)
    found = measure.measure(group, TINY, MACHINE)
    assert "C1 broken" in found["refused"]["auto"]
    assert "auto" not in {row["implementation"] for row in found["rows"]}
    with pytest.raises(AssertionError, match="C1 broken"):
        measure.samples(group, TINY)
    assert report.refusals({"layer_norm": {"groups": [found]}})


@pytest.mark.parametrize("scaled", [1.05, math.nan], indirect=True)
def test_a_wrong_result_at_full_size_gets_no_number(scaled, monkeypatch):
    monkeypatch.setattr(gate, "refusal", lambda *_: None)
    group = Group(layer_norm.SUBJECT, Norm(op="rms_norm", rows=64, features=128), "float32", "infer")
    assert "differs from PyTorch's" in measure.measure(group, TINY, MACHINE)["refused"]["auto"]


def row(implementation, median, ratio, direction="forward"):
    return {
        "direction": direction, "implementation": implementation, "median": median, "p20": median, "p80": median,
        "rounds": 9, "ratio": ratio, "flops": 10**6, "bytes": 10**5, "limit": 5e-5, "bound": "copy",
    }  # fmt: skip


def canned(**changes):
    group = {
        "key": "layer_norm M1 N8 float32 infer", "op": "layer_norm", "label": "M1 N8", "dtype": "float32",
        "kind": "infer", "headline": True, "chosen": "cpu", "memory": {"auto": 1 << 20}, "refused": {},
        "unavailable": {"aten": "because"}, "rows": [row("torch", 2e-4, 1.0), row("auto", 1e-4, 0.5)],
    }  # fmt: skip
    environment = {**dict.fromkeys(("cpu", "commit", "torch", "compiler", "cpu_capability"), "?"), "protocol": 1,
                   "cores": 2, "threads": 2, "dirty": True, "date": "2026-01-02T03", "device": "cpu"}  # fmt: skip
    return {"layer_norm": {"environment": environment, "limits": MACHINE, "groups": [{**group, **changes}]}}


def test_report_of_a_win():
    results = canned()
    text = report.table(results["layer_norm"])
    for part in ("automatic choice: cpu", "aten unavailable (because)", "1.0 GB/s", "50%", "2.00x", "with changes"):
        assert part in text, part
    assert report.losses(results) == [] and report.given_away(results) == []
    assert "| `layer_norm` M1 N8 | float32 | forward | 200 | 100 | 2.00x | 50% |" in readme.measured("cpu", results)


def test_report_of_losses():
    slow = canned(rows=[row("torch", 2e-4, 1.0), row("auto", 3e-4, 1.5)], chosen="aten")
    ((ratio, line),) = report.losses(slow)
    assert ratio == pytest.approx(1.5) and "300.0 against 200.0 us" in line
    told = readme.measured("there", slow)
    assert "(bench/results/there/layer_norm.json):" in told and told.endswith(f"or more:\n\n- {line}")
    assert readme.measured("there", canned()).endswith("or more: none.")
    assert report.given_away(slow) == ["layer_norm M1 N8 float32 infer"]
    small = canned(rows=[row("torch", 5e-5, 1.0), row("auto", 6e-5, 1.2)])
    assert report.losses(small) == [] and len(report.losses(small, noticeable=False)) == 1
    backward = [row(name, *times, "backward") for name, times in (("torch", (2e-4, 1.0)), ("auto", (9e-4, 4.5)))]
    assert report.losses(canned(rows=backward)) == [], "a choice is made for both directions together"
    for seconds, ratio in ((2.03e-4, 1.5), (3e-4, 1.015)):
        assert report.losses(canned(rows=[row("torch", 2e-4, 1.0), row("auto", seconds, ratio)])) == []
    assert "slower than PyTorch by more than 2%, where PyTorch takes 100 us or more: 1" in report.summary(slow)


def test_readmes_ranges_are_against_the_faster_of_eager_and_compiled():
    def group(op, label, dtype, *rows):
        return canned(op=op, label=label, dtype=dtype, rows=rows)["layer_norm"]["groups"][0]

    compiled = row("torch.compile", 1.5e-4, 0.7, "both")
    groups = [
        group("ffn", "one", "float32", row("torch", 2e-4, 1.0), row("auto", 1e-4, 0.1)),
        group("ffn", "two", "float32", row("torch", 9e-4, 1.0), row("auto", 6e-4, 0.1)),
        group("ffn", "small", "float32", row("torch", 9e-5, 1.0), row("auto", 1e-6, 0.1)),  # its fixed cost decides
        group("ffn", "three", "float32", row("torch", 2e-4, 1.0, "both"), compiled, row("auto", 1e-5, 0.1, "both"),
              row("torch", 2e-4, 1.0, "backward"), row("auto", 2e-7, 0.1, "backward")),
        group("ffn", "one", "float16", row("torch", 2e-4, 1.0), row("auto", 4e-4, 2.0)),
    ]  # fmt: skip
    results = canned()
    told = readme.ranges({"cpu-zen4": {**results, "ffn": {**results["layer_norm"], "groups": groups}}}).splitlines()
    name = "AMD EPYC of the Zen 4 kind: AVX-512, AVX512_BF16; 2 threads"
    assert told[0] == "| processor | type | norms | `ffn` |"
    assert told[2:] == [
        f"| {name} | float32 | 2.0 | 1.50 to 2.0; 15 |",
        f"| {name} | float16 | - | 0.50 |",
    ]


def test_results_continue_only_on_the_same_sources(tmp_path):
    path = tmp_path / "cpu" / "layer_norm.json"
    now = {"sources": "a", "date": "monday"}
    record.Results(path, now).add({"key": "one"})
    assert record.Results(path, {**now, "date": "tuesday"}).has("one")
    assert not record.Results(path, {**now, "sources": "b"}).has("one")
    assert not record.Results(path, now, fresh=True).has("one")


def test_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(timing, "QUICK", TINY)
    monkeypatch.setattr(limits, "measure", lambda dtypes: MACHINE)
    words = ["--op", "layer_norm", "--quick", "--only", "M1 N768 float32 infer", "--out", str(tmp_path)]
    assert door.main(words) == 0 and "[" in capsys.readouterr().out
    assert door.main(words) == 0 and "continuing: 1 of 1" in capsys.readouterr().out
    assert tables.main([str(tmp_path)]) == 0 and "vs PyTorch" in capsys.readouterr().out
    assert door.main(["--only", "no such case"]) == 1
    assert tables.main([str(tmp_path / "absent")]) == 1


def test_readme_is_up_to_date():
    held = {"README.md": {"matrix", "ranges", "gpu-ranges"}, "bench/RESULTS.md": {*readme.PROCESSORS, "gpu"}}
    for name, tables_in in held.items():
        text = (places.ROOT / name).read_text()
        assert text == readme.render(text), "run `python -m bench.report --readme`"
        assert set(re.findall("<!-- ([a-z0-9-]+):end -->", text)) == tables_in


def test_an_installed_package_asks_no_git(tmp_path, monkeypatch):
    """It may lie below another project's repository, whose commits say nothing of it."""
    assert record.checkout() and record.environment()["commit"] != f"version {tfk.__version__}"
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(record, "git", lambda *words: pytest.fail("git was asked"))
    (tmp_path / "tfm_kernels").mkdir()
    (tmp_path / "tfm_kernels" / "x.py").write_text("1")
    (tmp_path / "bench").mkdir()
    found = record.environment()
    assert found["commit"] == f"version {tfk.__version__}" and found["dirty"] is False
    (tmp_path / "bench" / "of_another_package.py").write_text("")
    assert record.environment()["sources"] == found["sources"]
    (tmp_path / "tfm_kernels" / "x.py").write_text("2")
    assert record.environment()["sources"] != found["sources"]


def test_a_file_that_holds_no_results_is_one_sentence(tmp_path, capsys):
    (tmp_path / "layer_norm.json").write_text("{")
    assert door.main(["--op", "layer_norm", "--quick", "--out", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and "holds no results; --fresh writes over it" in err
