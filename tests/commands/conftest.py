"""Tiny files of the four kinds, and a command line in this process."""

import resource
from contextlib import contextmanager

import pytest

from tfm_kernels import cli

SIZES = "--d-model 16 --heads 2 --feed-forward 32 --layers 1 --unit character --max-length 32 --quiet".split()
ENGLISH = ["a cat", "a dog", "the cat", "the dog", "cat and dog", "a dog and a cat"]
GERMAN = ["eine katze", "ein hund", "die katze", "der hund", "katze und hund", "ein hund und eine katze"]
FILES = {
    "en": "\n".join(ENGLISH),
    "de": "\n".join(GERMAN),
    "tsv": "\n".join(f"{line}\t{'pet' if 'a ' in line else 'beast'}" for line in ENGLISH),
    "book": "It was the best of times, it was the worst of times.\n" * 8,
}
# task -> the files that it learns from
TASKS = {"translate": ["en", "de"], "classify": ["tsv"], "masked-lm": ["en"], "causal-lm": ["book"]}


def written(folder):
    for name, content in FILES.items():
        (folder / name).write_text(content + "\n")
    return folder


def training(task, folder, out, *options):
    """The words of a training command."""
    files = [str(folder / name) for name in TASKS[task]]
    held = [] if task == "causal-lm" else ["--validation", *files]
    return ["train", task, *files, *held, "--out", str(out), "--steps", "4", *SIZES, *options]


@contextmanager
def largest_file(size):
    """Files can have so many bytes, and a write beyond them fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def files(tmp_path):
    return written(tmp_path)


@pytest.fixture
def run(capsys):
    """Runs a command; its exit code, standard output and standard error."""

    def command(*arguments):
        try:
            code = cli.main([str(word) for word in arguments])
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return command


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """A folder with one trained run of each task, named after it, and the files they learnt from."""
    folder = written(tmp_path_factory.mktemp("runs"))
    for task in TASKS:
        assert cli.main(training(task, folder, folder / task)) == 0
    return folder
