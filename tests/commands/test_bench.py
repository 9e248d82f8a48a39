"""``bench``: a proven model is timed beside the original, an unproven one has no speed; the grid of ops without one."""

import json
import re

import pytest
import torch

import tfm_kernels as tfk
from tests import test_cli
from tfm_kernels.bench import limits, model, timing
from tfm_kernels.patching import frozen

MODEL = f"""{test_cli.MODEL}
import tfm_kernels as tfk

def patched():
    built, inputs = build()
    tfk.patch(built, packed=False)
    return built, inputs

def nothing_to_replace():
    return nn.Bilinear(4, 4, 2), (torch.randn(2, 4), torch.randn(2, 4))

class WithoutGraph(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = build()[0]

    def forward(self, x):
        return self.encoder(x).detach()

def without_graph():
    return WithoutGraph(), build()[1]
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "my_model.py"
    file.write_text(MODEL)
    return file


@pytest.fixture
def bench(run, path, tmp_path):
    """Runs the command on a function of the model's file; exit code, output, errors and the report as JSON."""

    def command(function, *options):
        out = tmp_path / "speed.json"
        found = run("bench", f"{path}:{function}", "--seconds", "0.01", "--json", out, *options)
        return *found, json.loads(out.read_text()) if out.exists() else None

    return command


def rows(text):
    """The table's numbers: runner -> [median ms, times faster, least, largest, MiB]."""
    lines = re.findall(r"^(stock|patched|torch\.compile|patched, torch\.compile) +([\d. ]+)$", text, re.MULTILINE)
    return {name: [float(word) for word in numbers.split()] for name, numbers in lines}


def test_inference_is_timed_and_told(bench):
    code, out, err, report = bench("build")
    assert code == 0 and "PASSED" in out and "inference (no_grad) in float32" in out
    assert "modules: 1 TransformerEncoder, 1 TransformerEncoderLayer, 1 MultiheadAttention, 2 LayerNorm" in out
    assert "float64, forward and backward" in err and "timing" in err and "%" not in err
    assert list(rows(out)) == ["stock", "patched"] == [runner["name"] for runner in report["runners"]]
    assert report["proof"]["passed"] and report["proof"]["options"] == [
        {"packed": True, "freeze": False, "backend": None}
    ]
    assert report["environment"]["torch"] == torch.__version__ and report["environment"]["device"] == "cpu"
    assert report["environment"]["tfm_kernels"] == tfk.__version__ and report["environment"]["cpu"]
    assert not report["training"] and not report["problems"]


def test_the_table_is_what_the_rounds_say(bench):
    _, out, _, report = bench("build")
    assert len(report["rounds"]) >= 3 and f"{len(report['rounds'])} rounds" in out
    for runner in report["runners"]:
        name, taken = runner["name"], [each[runner["name"]] for each in report["rounds"]]
        ratios = sorted(each["stock"] / each[name] for each in report["rounds"])
        assert min(taken) <= runner["seconds"] <= max(taken)
        assert (runner["least"], runner["largest"]) == (ratios[0], ratios[-1])
        assert ratios[0] <= runner["faster"] <= ratios[-1]
        shown = runner["seconds"] * 1e3, runner["faster"], runner["least"], runner["largest"], runner["memory"] / 2**20
        assert rows(out)[name] == pytest.approx(shown, abs=0.051)
    assert report["runners"][0]["faster"] == report["runners"][0]["least"] == 1.0


@pytest.mark.parametrize("function", ["build", "with_loss"])
def test_training_steps(bench, monkeypatch, function):
    leaves = []
    step = model.Step.__call__

    def watched(self):
        ends = []
        real = torch.autograd.backward
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                torch.autograd, "backward", lambda tensors, grads: (ends.extend(tensors), real(tensors, grads))
            )
            step(self)
        leaves.append((self.model.training, [tuple(end.shape) for end in ends], [p.grad for p in self.leaves]))

    monkeypatch.setattr(model.Step, "__call__", watched)
    code, out, _, report = bench(function, "--train", "--dtype", "bfloat16")
    assert code == 0 and "training step (forward and backward) in bfloat16" in out
    assert report["training"] and report["proof"]["training"] and set(rows(out)) == {"stock", "patched"}
    assert len(leaves) > 6
    for training, shapes, gradients in leaves:
        assert training and shapes == [() if function == "with_loss" else (2, 5, 16)]
        assert set(gradients) == {None}, "a step ends with the memory it began with"


def test_both_are_timed_under_torch_compile_and_ours_is_proven_so(bench):
    code, out, _, report = bench("build", "--compile")
    assert code == 0 and list(rows(out)) == ["stock", "patched", "torch.compile", "patched, torch.compile"], out
    assert not report["problems"]
    assert {"output, compiled", "output, compiled, no_grad"} <= {row["tensor"] for row in report["proof"]["rows"]}


def test_what_cannot_be_compiled_is_not_timed_and_told(bench, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no compiler\nand more words")

    monkeypatch.setattr(torch, "compile", lambda model, **options: broken)
    code, out, _, report = bench("build", "--compile")
    assert code == 0 and list(rows(out)) == ["stock", "patched"]
    assert "torch.compile: not timed (RuntimeError: no compiler)" in out
    fails = "prove: the patched model fails under torch.compile: RuntimeError: no compiler"
    assert report["problems"] == {"torch.compile": "RuntimeError: no compiler", "patched, torch.compile": fails}


def test_freeze_is_proven_and_timed_frozen(bench, monkeypatch):
    called = []
    monkeypatch.setattr(
        model.Inference, "__call__", lambda self: called.append(any(map(frozen.is_frozen, self.model.modules())))
    )
    code, out, _, report = bench("build", "--freeze")
    assert code == 0 and report["proof"]["options"] == [{"packed": True, "freeze": True, "backend": None}]
    assert any("frozen model's" in note for note in report["proof"]["notes"]) and "note: " in out
    assert set(called) == {False, True}


def test_a_model_that_is_patched_is_compared_as_it_is(bench):
    code, out, _, report = bench("patched")
    assert code == 0 and report["proof"]["options"] == [{"packed": False, "freeze": False, "backend": None}]
    assert set(rows(out)) == {"stock", "patched"} and "1 TransformerEncoderLayer" in report["patched"]


def test_a_failed_proof_has_no_speed(bench, monkeypatch):
    right = tfk.ops.ffn
    monkeypatch.setattr(tfk.ops, "ffn", lambda *args, **kwargs: 1.01 * right(*args, **kwargs))
    monkeypatch.setattr(model.interleaved, "race_calls", lambda *args, **kwargs: pytest.fail("timed"))
    code, out, err, report = bench("build")
    assert code == 1 and not out
    last = err.splitlines()[-1]
    assert last.startswith("python -m tfm_kernels bench: no speed is told, because the proof failed: ")
    assert "FAILED in layers.0" in last
    assert not report["proof"]["passed"] and report["runners"] == report["rounds"] == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("{file}",), "must be file.py:function, module:function or a model folder"),
        (("{file}:nothing",), "has no function nothing"),
        (("{folder}",), "a model folder needs a text file of sentences after it: bench"),
        (("{file}:wrong_call",), "the model cannot be measured ("),
        (("{file}:nothing_to_replace",), "patch() replaces no module of Bilinear, so there is nothing to compare"),
        (("{file}:without_graph", "--train", "--seconds", "0"), "returns nothing that a gradient can flow from"),
        (("{file}:patched", "--freeze"), "the model is patched already"),
        (("{file}:build", "--freeze", "--train"), "--freeze is for inference only"),
        (("{file}:build", "--seconds", "-1"), "--seconds must be >= 0.0"),
        (("{file}:build", "--seconds", "inf"), "--seconds must be a finite number"),
        (("{file}:build", "--json", "/no/such/folder/x.json"), "a folder that exists"),
        (("{file}:build", "--quick"), "--quick is of the grid of ops, which takes no target"),
        (("--compile",), "--compile needs a target: file.py:function"),
        (("--seconds", "0"), "--seconds needs a target"),
        (("--only", "no such case"), "--only must match a group"),
        (("--only", "["), "--only: must be a regular expression"),
        (("--report", "{folder}"), "--report must name a folder that holds results"),
        (("--report", "{folder}", "--quick"), "--quick measures, and --report prints"),
        (("--op", "linear", "--quick", "--out", "{file}"), "cannot be used ("),
    ],
)
def test_bad_input_is_one_sentence(run, path, words, sentence):
    code, out, err = run("bench", *(word.format(file=path, folder=path.parent) for word in words))
    stages = r"forward|copying|without a graph|recording|first calls"
    told = [line for line in err.splitlines() if not re.search(rf"bench: .*({stages})[^(]*$", line)]
    assert code == 1 and not out and len(told) == 1, err
    assert told[0].startswith("python -m tfm_kernels bench: ") and sentence in told[0]


def test_report_of_files_that_are_no_results(run, tmp_path):
    (tmp_path / "other.json").write_text('{"a": 1}')
    code, out, err = run("bench", "--report", tmp_path)
    assert code == 1 and not out and "a folder of result files alone" in err and err.count("\n") == 1


def test_the_grid_goes_to_a_folder_here_and_can_be_read(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timing, "QUICK", timing.Plan(seconds=0.0, least=2, most=2))
    machine = {"copy": {"16384": 4e9}, "matrix": {"float32": 1e11, "bfloat16": 4e10, "float16": 2e11}}
    monkeypatch.setattr(limits, "measure", lambda dtypes: machine)
    words = "bench", "--op", "linear", "--quick", "--only", "^linear M4"
    code, out, err = run(*words)
    assert code == 0 and not err and "linear M4 768-768 float32 infer" in out
    assert [file.name for file in (tmp_path / "tfm_kernels_bench" / "quick" / "cpu").iterdir()] == ["linear.json"]
    reader = re.search(r"`python -m tfm_kernels (bench --report \S+)`", out)[1]
    code, out, _ = run(*reader.split())
    assert code == 0 and "vs PyTorch" in out and "linear M4 768-768 float32 infer" in out
    assert "continuing: 1 of 1" in run(*words)[1]


def test_list_prints_every_group_and_measures_nothing(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run("bench", "--list")
    assert code == 0 and len(out.splitlines()) == len(set(out.splitlines())) > 200
    assert "attention B8 H8 T128 D64 float32 infer" in out.splitlines() and not list(tmp_path.iterdir())
