"""bench.tasks: its commands are commands, a run is continued and judged, and README quotes what was measured."""

import gzip
import json
from pathlib import Path

import pytest

from bench import places, tasks

pytest.importorskip("safetensors")
DATA = places.ROOT.parent / "shared" / "data"  # real text is not part of the repository
TINY = "--steps 2 --d-model 16 --heads 2 --feed-forward 16 --layers 1 --vocabulary 300 --quiet"


def measured(tmp_path, name, data):
    where = ["--data", str(data), "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    code = tasks.main([name, *where, "--options", TINY])
    found = json.loads((tmp_path / "out" / f"{name}.json").read_text())
    assert code == (0 if found["reached"] else 1) and found["result"]["step"] == 2
    return found


def test_a_task_is_run_judged_and_continued(tmp_path, capsys):
    data = tmp_path / "tinyshakespeare"
    data.mkdir()
    (data / "input.txt.gz").write_bytes(gzip.compress(b"It was the best of times, it was the worst.\n" * 100))
    found = measured(tmp_path, "character-lm", tmp_path)
    assert not found["reached"] and "NOT REACHED" in capsys.readouterr().out
    assert found["result"]["seconds"] > 0 and found["environment"]["torch"] and "causal-lm" in found["command"]
    assert measured(tmp_path, "character-lm", tmp_path)["result"] == found["result"]


def test_missing_texts_and_unknown_tasks_are_one_sentence(tmp_path, capsys):
    assert tasks.main(["classification", "--data", str(tmp_path)]) == 1
    assert "classification needs" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        tasks.main(["poetry"])


@pytest.mark.parametrize("name", ["character-lm", "classification", "masked-lm"])
def test_the_commands_fit_the_real_texts(tmp_path, name):
    absent = [file for file in tasks.TASKS[name].needs if not (DATA / file).is_file()]
    if absent:
        pytest.skip(f"needs {DATA / absent[0]}: real text is kept outside the project")
    measured(tmp_path, name, DATA)


def test_seconds_of_all_parts_are_added():
    rows = [{"seconds": 2.0}, {"validation_loss": 1.0}, {"seconds": 5.0}, {"seconds": 1.0}, {"seconds": 4.5}]
    assert tasks.spent(rows) == 9.5


def test_the_recorded_results_reach_their_targets_and_readme_quotes_them():
    readme = (places.ROOT / "README.md").read_text()
    files = sorted((places.RESULTS / "cpu" / "tasks").glob("*.json"))
    assert "character-lm" in [Path(file).stem for file in files]
    for file in files:
        found = json.loads(file.read_text())
        task = tasks.TASKS[file.stem]
        assert found["reached"] and task.reached(found["result"]) and found["target"] == task.target
        assert f"python -m bench.tasks {file.stem}" in readme
    of = lambda name: json.loads((places.RESULTS / "cpu" / "tasks" / f"{name}.json").read_text())["result"]
    assert f"validation loss {of('character-lm')['best_loss']:.3f}" in readme
    assert f"dev accuracy {of('classification')['accuracy']:.1%}".replace("%", " %") in readme
    assert f"sacreBLEU {of('translation')['bleu']:.1f} on" in readme
    masked = of("masked-lm")
    assert f"{masked['accuracy']:.1%} of masked tokens".replace("%", " %") in readme
    assert f"most frequent token: {masked['unigram_accuracy']:.1%}".replace("%", " %") in readme
