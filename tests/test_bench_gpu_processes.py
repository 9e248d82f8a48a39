"""`python -m bench.gpu`: several processes share a part's items, and the conductor alone writes its file."""

import json
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from bench.gpu import conductor
from bench.gpu.part import GREEN, RED, Item, NotYetError, Part, Room, share
from bench.gpu.parts import PARTS
from bench.gpu.subjects import STEMS, SUBJECTS
from tests.test_bench_gpu import NOW, fail, run, states


@pytest.fixture(autouse=True)
def processors(monkeypatch):
    """(count): as many processors are this process's own; four unless told."""

    def have(count):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(count)))

    have(4)
    return have


def shared(items, processes=3, **options):
    return Part("contract", "a fake", 1.0, lambda room, results: iter(items), processes=processes, **options)


def noted(log, key, seconds=0.0, then=dict, **options):
    """An item that writes its key into a file of those that were begun; its record says when it ran, and where."""

    def find():
        with log.open("a") as file:
            file.write(f"{key}\n")
        begun = time.monotonic()
        time.sleep(seconds)
        then()
        return {"pid": os.getpid(), "begun": begun, "ended": time.monotonic(), "threads": torch.get_num_threads()}

    return Item(key, find, **options)


def begun(log):
    return sorted(log.read_text().split())


def died(pid):
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().split()[2] == "Z"


@pytest.mark.parametrize("count", [1, 2, 3, 5, 12])
@pytest.mark.parametrize("heavy", ["", "a", "dgb"])
def test_every_item_has_one_process(count, heavy):
    items = [Item(key, dict, heavy=key in heavy) for key in "abcdefgh"]
    shares = [share(items, index, count) for index in range(count)]
    assert sorted(item.key for found in shares for item in found) == [*"abcdefgh"]
    assert [item.key for item in shares[0] if item.heavy] == sorted(heavy)
    assert not heavy or count == 1 or all(item.heavy for item in shares[0])


def test_what_is_timed_has_one_process():
    several = {part.name for part in PARTS if part.processes > 1}
    assert several == {"contract", "repeats", "memory", "sanitizers"}


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_each_item_runs_once(tmp_path, processors, processes):
    processors(processes)
    log, keys = tmp_path / "log", [*"abcdefghi"]
    code, files = run(tmp_path, shared([noted(log, key, 0.02) for key in keys], processes=12))
    found = files["contract"]["groups"]
    assert code == 0 and begun(log) == sorted(states(files)) == keys
    assert len({item["pid"] for item in found}) == processes and files["contract"]["complete"] == sorted(STEMS)
    assert processes == 1 or {item["threads"] for item in found} == {1}


@pytest.mark.parametrize(
    "end, how",
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "ended by signal 9"),
        (lambda: os._exit(0), "ended by exit code 0"),
    ],
)
def test_a_process_that_dies_takes_one_item_with_it(tmp_path, capsys, end, how):
    log, keys = tmp_path / "log", [*"abcdefghi"]
    items = [noted(log, key, then=end if key == "d" else dict, op="rms_norm") for key in keys]
    code, files = run(tmp_path, shared(items))
    assert code == 1 and states(files) == {**dict.fromkeys(keys, GREEN), "d": RED} and begun(log) == keys
    (red,) = (item for item in files["contract"]["groups"] if item["state"] == RED)
    assert how in red["why"] and red["op"] == "rms_norm" and files["contract"]["complete"] == sorted(STEMS)
    assert f"contract: d: red its process {how}" in capsys.readouterr().out


def test_one_that_hangs_costs_its_patience_only(tmp_path):
    log, keys = tmp_path / "log", [*"abcdef"]
    items = [noted(log, key, 60.0 if key == "b" else 0.0) for key in keys]
    code, files = run(tmp_path, shared(items, patience=0.4))
    assert code == 1 and states(files) == {**dict.fromkeys(keys, GREEN), "b": RED} and begun(log) == keys


def test_a_lost_device_gets_a_new_process(tmp_path, monkeypatch):
    monkeypatch.setattr("bench.gpu.part.device_lost", lambda: True)
    log, keys = tmp_path / "log", [*"abcdef"]
    code, files = run(tmp_path, shared([noted(log, key, then=fail if key in "af" else dict) for key in keys]))
    assert code == 1 and states(files) == {**dict.fromkeys(keys, GREEN), "a": RED, "f": RED} and begun(log) == keys
    assert {item["why"] for item in files["contract"]["groups"] if item["state"] == RED} == {"y is wrong"}
    assert files["contract"]["complete"] == sorted(STEMS), "the last item's record came before its process's end"


def test_heavy_items_run_one_after_another(tmp_path):
    log = tmp_path / "log"
    items = [noted(log, key, 0.1, heavy=key in "bdf") for key in "abcdefgh"]
    code, files = run(tmp_path, shared(items, processes=4))
    found = {item["key"]: item for item in files["contract"]["groups"]}
    heavy, others = [found[key] for key in "bdf"], [found[key] for key in "acegh"]
    assert code == 0 and all(a["ended"] <= b["begun"] for a, b in zip(heavy, heavy[1:], strict=False))
    assert len({item["pid"] for item in heavy}) == 1 and len({item["pid"] for item in others}) == 3
    assert any(item["begun"] < heavy[-1]["ended"] for item in others)


@pytest.mark.parametrize("before, after", [(4, 2), (2, 3), (3, 1)])
def test_resumed_by_another_number_of_processes(tmp_path, processors, before, after):
    log, keys = tmp_path / "log", [*"abcdefghijkl"]
    items = [noted(log, key, 0.4) for key in keys]
    processors(before)
    code, files = run(tmp_path, shared(items, processes=12), words=["--minutes", "0.013"])  # a busy machine needs some
    done = len(states(files))
    assert code == 75 and 1 <= done < 12 and "complete" not in files["contract"]
    assert begun(log) == sorted(states(files)), "what was begun in time came to its end"
    processors(after)
    code, files = run(tmp_path, shared(items, processes=12))
    assert code == 0 and sorted(states(files)) == begun(log) == keys
    assert len({item["pid"] for item in files["contract"]["groups"][done:]}) <= after
    assert files["contract"]["complete"] == sorted(STEMS)


def test_an_op_is_complete_when_no_process_has_items_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(conductor, "GRACE", 0.1)
    log = tmp_path / "log"
    items = [noted(log, key, stem="layer_norm") for key in "abc"] + [noted(log, key, stem="ffn") for key in "de"]
    items += [noted(log, "f", 60.0, stem="ffn")]
    code, files = run(tmp_path, shared(items), words=["--minutes", "0.03"])
    assert code == 75 and sorted(states(files)) == [*"abcde"]
    assert files["contract"]["complete"] == sorted({*STEMS} - {"ffn"})


def test_none_is_complete_while_some_are_not_listed(tmp_path, capsys):
    def not_yet(room, results):
        yield from [Item(key, dict, stem="layer_norm") for key in "abcdef"]
        raise NotYetError("the extensions are not built")

    code, files = run(tmp_path, Part("contract", "a fake", 1.0, not_yet, processes=3))
    assert code == 75 and sorted(states(files)) == [*"abcdef"] and "complete" not in files["contract"]
    assert capsys.readouterr().out.count("the extensions are not built") == 2, "once a run of the part"


def test_a_process_that_cannot_list_its_items(tmp_path, capsys):
    """The others go on with theirs; what it would have run is not known, and nothing is complete."""
    first = tmp_path / "first"

    def items(room, results):
        try:
            first.touch(exist_ok=False)
        except FileExistsError:
            return iter([Item(key, dict, stem="ffn") for key in "abcdef"])
        os._exit(3)

    room = Room(tmp_path, NOW, time.monotonic() + 60, SUBJECTS)
    conductor._run(Part("contract", "a fake", 1.0, items, processes=3), room, print)
    file = room.results("contract").data
    found = states({"contract": file})
    assert found.pop("the part contract itself") == RED and set(found.values()) == {GREEN} and len(found) == 4
    assert "complete" not in file and "itself: red its process ended by exit code 3" in capsys.readouterr().out


def test_time_over(tmp_path):
    """No item begins behind the deadline, and what ended is in the file, by whichever process."""
    items = [noted(tmp_path / "log", str(n), 0.3) for n in range(30)]
    code, files = run(tmp_path, shared(items), words=["--minutes", "0.015"])
    assert code == 75 and 1 <= len(states(files)) < 30 and begun(tmp_path / "log") == sorted(states(files))
    assert "complete" not in files["contract"]


def test_what_is_expected_is_in_the_file_before_an_item_begins(tmp_path):
    def items(room, results):
        expected = results.data.setdefault("predicted", {})
        for key in "abcdef":
            expected[key] = {"forward": 1e-6}
            yield Item(key, lambda: {"seen": room.results("speed").data.get("predicted")})

    code, files = run(tmp_path, Part("speed", "a fake", 1.0, items, processes=3))
    every = {key: {"forward": 1e-6} for key in "abcdef"}
    assert code == 0 and files["speed"]["predicted"] == every
    assert all(item["seen"] == every for item in files["speed"]["groups"])


def test_a_record_that_no_file_can_hold_is_red(tmp_path):
    """Nor is it sent: the conductor would have to open it."""
    code, files = run(tmp_path, shared([Item("a", lambda: {"y": torch.ones(2)}), Item("b", dict)]))
    assert code == 1 and states(files) == {"a": RED, "b": GREEN}
    assert "Tensor is not JSON serializable" in json.dumps(files["contract"]["groups"])


def test_interrupted(tmp_path, monkeypatch, capsys):
    """Everything is ended, and what was found until then is in the file."""
    log = tmp_path / "pids"
    items = [noted(log, key, then=lambda: log.with_name(str(os.getpid())).touch() or time.sleep(60)) for key in "ab"]
    waited = conductor.wait

    def stop(*arguments):
        asleep = [path for path in tmp_path.iterdir() if path.name.isdigit()]
        if len(asleep) == 2 and '"c"' in (tmp_path / "contract.json").read_text():
            raise KeyboardInterrupt  # no signal: where tests run in the background, it is ignored
        return waited(*arguments)

    monkeypatch.setattr(conductor, "wait", stop)
    code, files = run(tmp_path, shared([*items, Item("c", dict)]))
    assert code == 75 and "interrupted; the same command goes on" in capsys.readouterr().err
    assert states(files) == {"c": GREEN}
    assert all(died(path.name) for path in tmp_path.iterdir() if path.name.isdigit())


def test_a_line_says_how_far_all_of_them_are(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("bench.gpu.ledger._SAY_EVERY", 0.0)
    run(tmp_path, shared([Item(key, partial(dict, n=1)) for key in "abcd"], processes=2))
    lines = [line for line in capsys.readouterr().out.splitlines() if "contract: " in line and "/" in line]
    assert [line.split()[0] for line in lines][-1] == "4/4" and len(lines) == 4
    assert all(line.endswith(GREEN) for line in lines)


def test_without_the_conductor_they_end(tmp_path):
    """Were it killed, nobody would take down what they find: each ends at the next thing that it has to tell."""
    log, marks = tmp_path / "log", tmp_path / "pids"
    marks.mkdir()
    items = [noted(log, str(n), 0.1, then=lambda: (marks / str(os.getpid())).touch()) for n in range(300)]
    leader = conductor._processes.Process(target=run, args=(tmp_path, shared(items)))
    leader.start()
    wait_until(lambda: len([*marks.iterdir()]) == 3)
    leader.kill()
    wait_until(lambda: all(died(path.name) for path in marks.iterdir()))
    leader.join()


def wait_until(true, seconds=20.0):
    last = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < last
        time.sleep(0.02)
