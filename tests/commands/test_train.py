"""``train``: four tasks on users' files, continued, never written over, and one sentence for what is wrong."""

import json
import subprocess
import sys

import pytest

from tests.commands.conftest import TASKS, largest_file, training

pytest.importorskip("safetensors")


def refused(found, sentence):
    """Exit code 1, nothing printed but one line, and that holds the sentence."""
    code, out, err = found
    assert code == 1 and not out and err.count("\n") == 1, err
    assert sentence in err and err.startswith("python -m tfm_kernels ")


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("task", ["", *TASKS])
def test_help_shows_an_example(run, task):
    code, out, _ = run("train", *[task] * bool(task), "--help")
    assert code == 0 and f"python -m tfm_kernels train {task}".strip() in out and "example" in out


@pytest.mark.parametrize("task", TASKS)
def test_a_run_is_trained_continued_and_never_written_over(run, files, task):
    out = files / "run"
    code, printed, err = run(*training(task, files, out))
    found = json.loads(printed)
    assert code == 0 and found["step"] == 4 and found["validation_loss"] > 0 and "parameters" in err
    before = contents(out)
    refused(run(*training(task, files, out)), "holds a run; --resume continues it")
    assert before == contents(out)
    code, printed, _ = run(*training(task, files, out, "--resume", "--steps", "6", "--schedule", "cosine"))
    assert code == 0 and json.loads(printed)["step"] == 6
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 4, 5, 6, 6]
    refused(run(*training(task, files, out, "--resume", "--seed", "1")), "its training seed is 0, now it is 1")
    (files / TASKS[task][0]).write_text((files / TASKS[task][0]).read_text().replace("a", "o"))
    refused(run(*training(task, files, out, "--resume", "--steps", "6")), "cannot be continued: its data file 1 is ")


@pytest.mark.parametrize(("task", "cut"), [("classify", 4), ("masked-lm", 4), ("causal-lm", 8)])
def test_how_many_texts_were_cut_is_told(run, files, task, cut):
    options = ["--by-line", "--hold-out", "0"] if task == "causal-lm" else []
    code, _, err = run(*training(task, files, files / "short", *options, "--max-length", "8"))
    assert code == 0 and f"; {cut} of them cut at --max-length 8; " in err
    code, _, err = run(*training(task, files, files / "long", *options, "--max-length", "64"))
    assert code == 0 and " cut " not in err


@pytest.mark.parametrize("end", ["", "\n"])
def test_without_a_part_held_out_every_line_is_learnt(run, files, end):
    (files / "book").write_text("first\nsecond\nthird" + end)
    code, out, err = run(*training("causal-lm", files, files / "run", "--by-line", "--hold-out", "0"))
    assert code == 0 and err.startswith("3 lines, ") and "validation_loss" not in out


def test_baselines_are_printed(run, files):
    for task, name in (("classify", "majority_accuracy"), ("masked-lm", "unigram_accuracy")):
        code, out, _ = run(*training(task, files, files / f"run-{task}"))
        found = json.loads(out)
        assert code == 0 and 0.0 <= found[name] <= 1.0 and 0.0 <= found["validation_accuracy"] <= 1.0
        if task == "classify":
            assert found[name] == pytest.approx(0.5)  # three of six


def test_byte_pairs_one_vocabulary_and_lines(run, files):
    pytest.importorskip("tokenizers")
    options = ["--unit", "byte-pair", "--vocabulary", "300", "--share-embeddings", "--max-length", "64"]
    assert run(*training("translate", files, files / "one", *options))[0] == 0
    assert (files / "one" / "source.json").read_text() == (files / "one" / "target.json").read_text()
    code, _, err = run(*training("causal-lm", files, files / "two", "--by-line", "--max-length", "64"))
    assert code == 0 and "7 lines" in err


@pytest.mark.parametrize(
    ("task", "change", "sentence"),
    [
        ("translate", {"de": "one\n"}, "has 6 lines but"),
        ("translate", {"de": ""}, "holds no text"),
        ("translate", {"en": "caf\xe9\n".encode("latin1")}, "must be UTF-8 text, got byte 0xe9 in line 1"),
        ("translate", {"en": None}, "cannot be read (No such file or directory)"),
        ("translate", {"en": "x" * 99, "de": "y"}, "all 1 pairs have a sentence of more than 32 tokens"),
        ("classify", {"tsv": "fine\tpet\nno label\n"}, "a text, a tab and a label in each line, got line 2"),
        ("classify", {"tsv": "fine\tpet\ngood\tpet\n"}, "at least two different labels, got only 'pet'"),
        ("masked-lm", {"en": "\n \n"}, "holds no text"),
        ("causal-lm", {"book": "too short"}, "book to learn from must have at least 64 tokens, got 10; a smaller"),
        ("causal-lm", {"book": "word " * 50}, "the held-out part of "),
    ],
)
def test_a_bad_file_is_one_sentence_and_nothing_is_made(run, files, task, change, sentence):
    for name, content in change.items():
        (files / name).unlink()
        if content is not None:
            (files / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(run(*training(task, files, files / "run")), sentence)
    assert not (files / "run").exists()


def test_an_unknown_label_in_the_validation_is_one_sentence(run, files):
    (files / "dev").write_text("a cat\tplant\n")
    found = run(*training("classify", files, files / "run", "--validation", files / "dev"))
    refused(found, "dev has the unknown label 'plant'; known are beast, pet")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--steps", "0"], "--steps must be >= 1, got 0"),
        (["--dropout", "2"], "--dropout must be <= 1, got 2.0"),
        (["--learning-rate", "nan"], "--learning-rate must be >= 0, got nan"),
        (["--learning-rate", "inf"], "--learning-rate must be a finite number, got inf"),
        (["--clip", "inf"], "--clip must be a finite number, got inf"),
        (["--weight-decay", "inf"], "--weight-decay must be a finite number, got inf"),
        (["--smoothing", "nan"], "--smoothing must be >= 0, got nan"),
        (["--seed", "99999999999999999999999"], "--seed must be <= 18446744073709551615, got 99999999999999999999999"),
        (["--vocabulary", "100000000000000000000"], "--vocabulary must be <= 10000000, got 100000000000000000000"),
        (["--max-length", "1000000000000"], "--max-length must be <= 1000000, got 1000000000000"),
        (["--d-model", "1000000", "--heads", "1", "--max-length", "999999"], "RuntimeError: "),
        (["--accumulation", "7"], "--accumulation must be at most the number of examples, 6, got 7"),
        (["--schedule", "noam", "--warmup", "0"], "--warmup must be >= 1, got 0"),
        (["--heads", "3"], "d_model"),
        (["--tokens", "8"], "--tokens must be at least the longest example"),
        (["--activation", "tanh"], "activation must be"),
        (["--precision", "int8"], "invalid choice: 'int8'"),
        (["--unit", "byte-pair", "--vocabulary", "9"], "vocabulary size must be at least 261, got 9"),
    ],
)
def test_a_bad_option_is_one_sentence_and_nothing_is_made(run, files, options, sentence):
    refused(run(*training("translate", files, files / "run", *options)), sentence)
    assert not (files / "run").exists()


def test_a_part_of_a_stream_that_is_too_short_is_named_with_a_way_out(run, files):
    (files / "book").write_text("word " * 50)
    words = (
        "the held-out part of {} must have at least 33 tokens, got 27; a smaller --max-length or a larger --hold-out"
    )
    refused(run(*training("causal-lm", files, files / "run")), words.format(files / "book"))
    found = run(*training("causal-lm", files, files / "run", "--validation", files / "en", "--max-length", "100"))
    refused(found, f"{files / 'en'} must have at least 101 tokens, got 58; a smaller --max-length is one way out")
    assert run(*training("causal-lm", files, files / "run", "--hold-out", "0"))[0] == 0


def test_a_validation_of_which_nothing_is_masked_is_one_sentence(run, files):
    (files / "short").write_text("a\n")
    found = run(*training("masked-lm", files, files / "run", "--validation", files / "short"))
    refused(found, "short is so short that none of its 3 tokens is masked; more lines or another --seed are needed")
    assert not (files / "run").exists()


def test_metrics_that_are_none_are_one_sentence_and_stay(run, files):
    assert run(*training("masked-lm", files, files / "run"))[0] == 0
    path = files / "run" / "metrics.jsonl"
    path.write_text("null\n" + path.read_text())
    before = path.read_text()
    again = training("masked-lm", files, files / "run", "--resume", "--steps", "6")
    code, out, err = run(*again)
    assert code == 1 and not out and "metrics.jsonl must have an object with a step in each line, got line 1" in err
    assert path.read_text() == before and "Traceback" not in err


def test_a_folder_with_other_things_is_left_alone(run, files):
    (files / "out").mkdir()
    (files / "out" / "thesis.txt").write_text("years of work")
    for resume in ([], ["--resume"]):
        refused(run(*training("masked-lm", files, files / "out", *resume)), "is not empty and holds no run")
    assert [path.name for path in (files / "out").iterdir()] == ["thesis.txt"]
    refused(run(*training("masked-lm", files, files / "en")), "cannot be written")


def test_a_run_that_another_process_trains_is_left_alone(run, files):
    from tfm_kernels.training.run_folder import held

    assert run(*training("masked-lm", files, files / "run"))[0] == 0
    before = contents(files / "run")
    with held(files / "run"):
        again = training("masked-lm", files, files / "run", "--resume", "--steps", "8")
        refused(run(*again), "is being trained by another process")
        assert contents(files / "run") == before
    assert run(*again)[0] == 0


@pytest.mark.parametrize("unit", ["character", "byte-pair"])
def test_a_run_is_not_continued_with_another_part_held_out(run, files, unit):
    if unit == "byte-pair":
        pytest.importorskip("tokenizers")
    (files / "book").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(60)))
    command = training("causal-lm", files, files / "run", "--unit", unit, "--vocabulary", "300", "--max-length", "16")
    assert run(*command)[0] == 0
    before = contents(files / "run")
    for hold_out in ("0.7", "0"):
        found = run(*command, "--resume", "--hold-out", hold_out)
        refused(found, f"cannot be continued: its hold_out is 0.1, now it is {float(hold_out)}")
    assert contents(files / "run") == before
    config = files / "run" / "config.json"  # as a version wrote it that did not say how much was held out
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "hold_out"}))
    before = contents(files / "run")
    if unit == "byte-pair":
        refused(run(*command, "--resume", "--hold-out", "0.7"), "text.json is another vocabulary than these options")
        assert contents(files / "run") == before
    assert run(*command, "--resume")[0] == 0


def test_a_full_disk_is_one_sentence_and_the_run_goes_on_later(run, files, monkeypatch):
    from tfm_kernels import _durable as durable

    def full(*arguments):
        raise OSError(28, "No space left on device", str(arguments[0]))

    monkeypatch.setattr(durable.os, "rename", full)
    code, out, err = run(*training("masked-lm", files, files / "run"))
    assert code == 1 and not out and "cannot be used (No space left on device)" in err and "Traceback" not in err
    monkeypatch.undo()
    assert run(*training("masked-lm", files, files / "run", "--resume"))[0] == 0


@pytest.mark.parametrize(
    ("size", "steps", "words"),
    [
        (8192, 4, "step-00000004 cannot be used (Error while serializing: "),
        (8192, 99, "metrics.jsonl cannot be used (File too large)"),
        (400, 4, "run cannot be written (File too large)"),
    ],
)
def test_files_that_cannot_be_whole_are_one_sentence(run, files, size, steps, words):
    command = training("masked-lm", files, files / "run")
    assert run(*command, "--steps", "2")[0] == 0
    step = files / "run" / "checkpoints" / "step-00000002"
    before = contents(step)
    with largest_file(size):
        code, out, err = run(*command, "--resume", "--steps", steps)
    assert code == 1 and not out and words in err and "File too large" in err and "Traceback" not in err
    assert contents(step) == before and not list((files / "run").rglob("*.partial"))
    assert run(*command, "--resume")[0] == 0


def test_doctor_needs_no_extra():
    absent = "sys.modules.update(dict.fromkeys(['safetensors', 'tokenizers', 'tqdm', 'sacrebleu', 'matplotlib']))"
    code = f"import sys; {absent}; from tfm_kernels import cli; sys.exit(cli.main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "CPU kernels" in done.stdout, done.stderr


@pytest.mark.parametrize("package", ["safetensors", "tokenizers"])
def test_a_missing_package_is_one_sentence(run, files, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    options = ["--unit", "byte-pair", "--vocabulary", "300"] if package == "tokenizers" else []
    refused(run(*training("translate", files, files / "run", *options)), f"`pip install {package}` brings it")
    assert not (files / "run").exists()
