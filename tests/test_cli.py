"""The command line: help with an example, and one sentence with exit code 1 on bad input."""

import pytest

from tfm_kernels import cli


def run(capsys, *arguments):
    try:
        code = cli.main(arguments)
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("command", [(), ("doctor",)])
def test_help_shows_an_example(capsys, command):
    code, out, _ = run(capsys, *command, "--help")
    assert code == 0 and "example" in out and "python -m tfm_kernels doctor" in out


@pytest.mark.parametrize("arguments", [(), ("dance",), ("doctor", "--loud")])
def test_bad_usage_is_one_sentence_and_exit_code_1(capsys, arguments):
    code, out, err = run(capsys, *arguments)
    assert code == 1 and not out and err.count("\n") == 1 and "--help" in err


def test_doctor_prints_its_findings(capsys):
    code, out, _ = run(capsys, "doctor")
    assert code == 0 and "CPU kernels" in out
