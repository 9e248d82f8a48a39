"""`python -m bench.launch`: the host's half of a call, compiled and bound for a GPU that is not there."""

import json

from bench import launch


def test_what_a_call_costs_the_host(capsys, tmp_path):
    assert launch.main(["--op", "ffn", "--out", str(tmp_path / "launch.json")]) == 0
    head, _, row = capsys.readouterr().out.strip().splitlines()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert head.count("|") == row.count("|") == 9 and cells[0] == "`ffn`"
    compiling, from_disk = float(cells[1].removesuffix(" s")), float(cells[2].removesuffix(" ms")) / 1e3
    planned, warm, backward = (float(cells[place].removesuffix(" us")) / 1e6 for place in (3, 4, 7))
    written = json.loads((tmp_path / "launch.json").read_text())
    assert list(written["ops"]) == ["ffn"] and f"{1e6 * written['ops']['ffn']['warm']:.0f} us" == cells[4]
    assert 0 < warm < planned and 10 * planned < from_disk and warm < compiling and 0 < backward < compiling


def test_a_process_that_fails_is_told(monkeypatch):
    monkeypatch.setattr(launch.sys, "executable", "/bin/false")
    try:
        launch.measure("ffn")
    except RuntimeError as error:
        assert str(error).startswith("bench.launch: ffn: ")
    else:
        raise AssertionError("nothing was told")
