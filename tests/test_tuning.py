"""tune(): what it measures, what automatic choice makes of it, and that nothing else changes."""

import inspect
import json

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from tfm_kernels import _backend, _library, _measured, interleaved, tuning

pytestmark = pytest.mark.usefixtures("quick_tuning")


@pytest.fixture
def fastest(monkeypatch):
    """Makes the clock say that one backend is the fastest."""

    def decree(name):
        def race(runs, *rest):
            for run in runs.values():
                run()
            return [{rival: 1.0 if rival == name else 2.0 for rival in runs}] * 3

        monkeypatch.setattr(interleaved, "race_calls", race)

    return decree


def chosen(op, *args, **kwargs):
    return tfk.explain(op, *args, **kwargs).splitlines()[-1]


x = torch.randn(64, 48)


@pytest.mark.parametrize("name", ["aten", "cpu"])
def test_the_fastest_is_chosen_for_calls_of_its_bucket(fastest, name):
    fastest(name)
    before = chosen("layer_norm", x)
    report = tfk.tune("layer_norm", x)
    (row,) = report.rows
    assert row.chosen == name and row.call == "layer_norm float32 rows=64 features=48" and row.device == "cpu"
    assert f"-> {row.before} (" in before and report.changed == ([] if row.before == name else [row])
    assert chosen("layer_norm", x) == f"  -> {name} (automatic choice, measured by tune())"
    assert chosen("layer_norm", x[:50]) == chosen("layer_norm", x)  # 50 rows are nearer to 64 than to 32
    for other in (x[:40], x[:, :47], x.bfloat16(), x.clone().requires_grad_()):
        assert "measured" not in chosen("layer_norm", other)
    with tfk.use_backend("reference"):
        assert chosen("layer_norm", x) == "  -> reference (use_backend() asks for it)"


def test_the_calls_themselves_go_by_it(fastest):
    w = x.clone().requires_grad_()
    for name in ("cpu", "aten"):
        fastest(name)
        tfk.tune("layer_norm", w)
        assert ("Fused" in tfk.ops.layer_norm(w).grad_fn.name()) is (name == "cpu")


def test_a_little_faster_is_not_enough(monkeypatch):
    preferred = chosen("layer_norm", x).split()[1]
    other = {"aten": "cpu", "cpu": "aten"}[preferred]
    for gain, taken in ((0.985, preferred), (0.975, other)):
        monkeypatch.setattr(interleaved, "race_calls", lambda runs, *rest, g=gain: [{preferred: 1.0, other: g}] * 3)
        assert tfk.tune("layer_norm", x).rows[0].chosen == taken


def test_it_is_kept_for_other_processes_of_this_setting(fastest, monkeypatch):
    fastest("cpu")
    report = tfk.tune("layer_norm", x)
    assert report.file == _measured.file() and report.file.exists()
    kept = json.loads(report.file.read_text())
    assert kept["format"] == _measured.FORMAT and f"torch {torch.__version__}" in next(iter(kept["settings"]))
    _measured.ignore()
    _backend.Choices.forget()
    assert "measured" not in chosen("layer_norm", x)
    monkeypatch.setattr(_measured, "_table", None)  # as before the first choice of a process
    assert "cpu (automatic choice, measured by tune())" in chosen("layer_norm", x)
    monkeypatch.setattr(_measured, "setting", lambda device: "another machine")
    assert "measured" not in chosen("layer_norm", x)


def test_what_others_wrote_since_is_not_lost(fastest):
    fastest("cpu")
    tfk.tune("layer_norm", x)
    before = json.loads(_measured.file().read_text())["settings"]
    _measured.ignore()  # as a process that has read an empty table
    tfk.tune("layer_norm", x[:8])
    after = json.loads(_measured.file().read_text())["settings"]
    for setting, entries in before.items():
        assert entries.items() < after[setting].items()


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 0}', '{"format": 1, "settings": {"a": {"b": 3}}}', "\xff"])
def test_a_file_that_is_no_table_is_left_alone(fastest, content, monkeypatch):
    file = _measured.file()
    file.parent.mkdir()
    file.write_text(content, encoding="latin-1")
    monkeypatch.setattr(_measured, "_table", None)  # as before the first choice of a process
    with pytest.warns(UserWarning, match="automatic choice goes without .* `python -m tfm_kernels tune --forget`"):
        assert "measured" not in chosen("layer_norm", x)
    fastest("cpu")
    report = tfk.tune("layer_norm", x)
    assert report.file is None and "is not a table" in report.problem and report.problem in report.table()
    assert "cpu (automatic choice, measured" in chosen("layer_norm", x), "it counts in this process"
    assert file.read_text(encoding="latin-1") == content
    assert _measured.forget() and not file.exists()


def test_a_backend_that_cannot_is_not_chosen():
    """A table may come from a build that could more."""
    _measured.keep("cpu", {_backend.bucket(*described("layer_norm", x))[1]: {"backend": "cuda", "seconds": {}}})
    assert "measured" not in chosen("layer_norm", x)
    _measured.keep("cpu", {_backend.bucket(*described("layer_norm", x))[1]: {"backend": "nobody", "seconds": {}}})
    assert "measured" not in chosen("layer_norm", x)


def described(op, *args, **kwargs):
    entry = _backend.OPS[op]
    return entry, entry.describe(*args, **kwargs)


def rand(*shape, dtype=torch.float32, grad=False):
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


def heads(tokens=12, grad=False):
    return [rand(2, tokens, 4, 8, grad=grad).transpose(1, 2) for _ in range(3)]


ENDS = torch.tensor([0, 3, 12])
PACKED = [rand(12, 4, 8) for _ in range(3)]
BIAS = rand(1, 4, 12, 12, grad=True)
INT8 = torch.ones(48, 48, dtype=torch.int8), torch.ones(48)
CALLS = {
    "layer_norm": ((x, torch.ones(48), torch.zeros(48)), {}),
    "add_layer_norm": ((rand(6, 8, grad=True), rand(6, 8)), {"dropout_p": 0.1}),
    "add_layer_norm mixed": ((rand(6, 8, dtype=torch.bfloat16), rand(6, 8, dtype=torch.bfloat16), torch.ones(8)), {}),
    "rms_norm": ((x, torch.ones(48)), {}),
    "add_rms_norm": ((x, x), {}),
    "linear": ((rand(4, 8), rand(5, 8)), {}),
    "int8_linear": ((rand(4, 8), torch.ones(5, 8, dtype=torch.int8), torch.ones(5)), {}),
    "int8_ffn": ((x, *INT8, None, *INT8, rand(48)), {"activation": "gelu"}),
    "int8_ffn gated": ((x, *INT8, rand(48), *INT8, None), {"gate": INT8[0], "gate_scale": INT8[1]}),
    "int8_linear dynamic": ((x, torch.ones(5, 48, dtype=torch.int8), torch.ones(5), rand(5)), {"dynamic": True}),
    "ffn": ((x, rand(16, 48), None, rand(48, 16), None), {"gate": rand(16, 48), "activation": "silu"}),
    "ffn gate's bias": ((x, rand(16, 48), rand(32), rand(48, 16), None), {"gate": rand(16, 48), "activation": "silu"}),
    "ffn training": ((rand(6, 8), rand(16, 8, grad=True), rand(16), rand(8, 16), rand(8)), {"dropout_p": 0.1}),
    "linear_cross_entropy": ((x, rand(16, 48), torch.arange(64) % 16), {"label_smoothing": 0.1}),
    "linear_cross_entropy training": (
        (rand(2, 3, 8), rand(16, 8, grad=True), torch.full((2, 3), 5), rand(16)),
        {"reduction": "sum", "ignore_index": 5},
    ),
    "rotary": ((rand(2, 3, 5, 8), rand(5, 6), rand(5, 6)), {"interleaved": True}),
    "rotary training": ((rand(2, 3, 5, 8, grad=True), rand(2, 5, 8), rand(2, 5, 8)), {}),
    "attention": ((*heads(), tfk.Mask.causal() & tfk.Mask.lengths(torch.tensor([12, 5]))), {}),
    "attention training": ((*heads(grad=True),), {"bias": BIAS, "scale": 0.2}),
    "attention_varlen": ((*PACKED, ENDS, ENDS, 9, 9), {}),
    "scaled_dot_product_attention": ((rand(4, 12, 8), rand(4, 12, 8), rand(4, 12, 8)), {"is_causal": True}),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_op_is_measured_by_calls_of_the_same_bucket(name):
    """The stand-in of a call is described, and so chosen, as the call itself."""
    op, (args, kwargs) = name.split()[0], CALLS[name]
    entry, call = described(op, *args, **kwargs)
    told = []
    stand_in = entry.stand_in(call)
    with _backend.telling_choices(lambda *found: told.append(found)):
        outputs = stand_in.run(None)
    if "attention" not in op:  # which is handed to the backend as it was described
        assert [_backend.bucket(*found) for found in told] == [_backend.bucket(entry, call)]
    assert all(isinstance(output, torch.Tensor) for output in outputs)
    assert bool(stand_in.leaves) is ("training" in _backend.bucket(entry, call)[1])
    if stand_in.leaves:
        torch.autograd.grad(outputs, stand_in.leaves, [torch.ones_like(output) for output in outputs])
    report = tfk.tune(op, {**dict(zip(entry_names(op), args, strict=False)), **kwargs})
    assert [row.call for row in report.rows] == [_backend.bucket(entry, call)[1]] and not report.alone
    assert set(report.rows[0].seconds) == {"aten", "cpu"}


def test_a_gates_bias_is_measured_by_itself():
    """GPU kernels that add none, or are not proven to, are not chosen by what calls without one took."""
    assert (
        len(
            {
                _backend.bucket(*described("ffn", *args, **kwargs))
                for args, kwargs in (CALLS["ffn"], CALLS["ffn gate's bias"])
            }
        )
        == 2
    )


def test_a_setting_names_all_kinds_of_gpus(monkeypatch):
    """Once each: what an A100 measured is not for the H200 beside it."""
    names = ["H200", "H200", "A100"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: names[gpu])
    told = []
    for count in (3, 2, 0):
        del names[count:]
        _measured._setting.cache_clear()
        told.append(_measured._setting("cuda", 0).partition(", CUDA")[0])
    _measured._setting.cache_clear()
    assert told == ["H200 and A100", "H200", "cuda"]


def test_all_gpus_are_waited_for(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    tuning._wait("cpu")
    assert not waited
    tuning._wait("cuda")
    assert waited == [0, 1]


def test_what_tells_buckets_and_settings_apart():
    q, k, v = heads()
    assert _measured._setting("cpu", 1) != _measured._setting("cpu", 2)
    buckets = {_backend.bucket(*described("attention", q, k, v, dropout_p=p)) for p in (0.0, 0.1)}
    assert len(buckets) == 2


def entry_names(op):
    return list(inspect.signature(getattr(tfk.ops, op)).parameters)


def test_what_one_backend_alone_can_run_is_not_measured():
    q, k, v = heads()
    report = tfk.tune("attention", {"query": q, "key": k, "value": v, "dropout_p": 0.1})
    assert not report.rows and list(report.alone.values()) == ["cpu"]
    assert "cpu alone can run it" in report.table() and report.file is None and not _measured.file().exists()


def test_a_model_is_measured_call_by_call_and_is_as_before():
    model = tfk.nn.TransformerEncoder(tfk.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    model = nn.Sequential(model, nn.Flatten(0, 1), nn.BatchNorm1d(16))
    given = torch.randn(3, 6, 16)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    random = torch.random.get_rng_state()
    told = []
    report = tfk.tune(model, given, progress=lambda *words: told.append(words))
    assert torch.equal(torch.random.get_rng_state(), random)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())
    ops = [row.call.split()[0] for row in report.rows] + [call.split()[0] for call in report.alone]
    assert sorted(ops) == ["add_layer_norm", "attention", "ffn"], "both layers make the same calls"
    assert all("training" in row.call and "dropout" in row.call for row in report.rows)
    assert [number for _, number, _ in told] == list(range(len(ops))) and {count for _, _, count in told} == {len(ops)}
    with torch.no_grad():
        report = tfk.tune(model.eval(), given)
    assert sorted(row.call.split()[0] for row in report.rows) == ["add_layer_norm", "attention", "ffn"]
    assert not any("training" in row.call or "dropout" in row.call for row in report.rows)
    assert json.loads(report.to_json())["rows"][0]["seconds"].keys() == {"aten", "cpu"}


def test_compiled_graphs_do_not_look_at_it(fastest):
    fastest("cpu")
    tfk.tune("layer_norm", x)
    seen = []

    def backend(graph, _):
        seen.append(graph.code)
        return graph

    torch.compile(lambda x: tfk.ops.layer_norm(x), fullgraph=True, backend=backend)(x)
    _measured.ignore()
    torch.compiler.reset()
    torch.compile(lambda x: tfk.ops.layer_norm(x), fullgraph=True, backend=backend)(x)
    assert seen[0] == seen[1]


def test_kernels_that_no_gpu_has_proven_are_no_rivals():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        entry, call = described("layer_norm", torch.empty(4, 8, device="cuda"))
        assert tuning._rivals(entry, call) == ["aten"]


def test_kernels_that_this_gpu_has_proven_are_rivals(monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(_backend, "_proven", True)
    for name in ("unreachable", "missing"):
        monkeypatch.setattr(_library, name, lambda *where: None if "cpu" not in where else "not here")
    with FakeTensorMode():
        x, w = torch.empty(4, 8, device="cuda"), torch.empty(8, 8, device="cuda")
        entry, call = described("layer_norm", x)
        assert tuning._rivals(entry, call) == ["aten", "triton", "cuda"]
        gate = {"gate": w, "activation": "silu"}
        entry, call = described("ffn", x, w, None, w, None, **gate)
        assert tuning._rivals(entry, call) == ["aten", "triton", "cuda"]
        entry, call = described("ffn", x, w, torch.empty(16, device="cuda"), w, None, **gate)
        assert tuning._rivals(entry, call) == ["aten"], "no GPU has proven a gate with a bias"


REFUSED = {
    "neither model nor op": (TypeError, "model_or_op must be", lambda: tfk.tune(3, x)),
    "no such op": (ValueError, "the op must be one of", lambda: tfk.tune("layernorm", x)),
    "no inputs": (TypeError, "inputs must be a tensor, a tuple or a dict", lambda: tfk.tune("layer_norm", None)),
    "a wrong argument": (ValueError, "layer_norm: weight must", lambda: tfk.tune("layer_norm", (x, torch.ones(3)))),
    "a named backend": (
        ValueError,
        "leaves nothing to choose",
        lambda: tfk.tune("layer_norm", {"x": x, "backend": "cpu"}),
    ),
    "no fused layer": (ValueError, "tfm_kernels.patch", lambda: tfk.tune(nn.Linear(48, 2), x)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_measured_is_refused(name):
    error, words, call = REFUSED[name]
    with pytest.raises(error, match=words):
        call()


def test_use_backend_leaves_nothing_to_measure():
    with (
        tfk.use_backend("cpu"),
        pytest.raises(ValueError, match="leaves nothing to choose; call tune\\(\\) outside it"),
    ):
        tfk.tune("layer_norm", x)


@pytest.mark.parametrize(("count", "power"), [(0, 0), (1, 1), (2, 2), (3, 4), (5, 4), (6, 8), (90, 64), (91, 128)])
def test_counts_are_rounded_by_ratio(count, power):
    assert _measured.rounded(count) == power


def test_doctor_tells_what_was_measured(fastest):
    assert "nothing measured by tune()" in tfk.doctor()
    fastest("aten")
    tfk.tune("layer_norm", x)
    assert f"1 buckets of calls on cpu, in {_measured.file()}" in tfk.doctor()
