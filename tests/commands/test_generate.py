"""``generate``: a text is continued, beyond the context too, and one sentence for what is wrong."""

import pytest
import torch

from tests.commands.conftest import training
from tests.commands.test_train import refused
from tfm_kernels.training import run_folder
from tfm_kernels.training.vocabulary import END, MASK, START

pytest.importorskip("safetensors")


def test_greedy_continues_as_the_model_does(run, runs):
    trained = run_folder.opened(runs / "causal-lm", "causal-lm")
    vocabulary = trained.vocabularies["text"]
    ids = torch.tensor([vocabulary.encode("It was")], device=trained.device)
    for _ in range(8):
        ids = torch.cat([ids, trained.model(ids)[:, -1:].argmax(-1)], 1)
    code, out, err = run("generate", runs / "causal-lm", "--prompt", "It was", "--tokens", 8, "--greedy")
    assert code == 0 and not err and out == vocabulary.decode(ids[0].tolist()) + "\n"


def test_drawn_text_follows_the_seed_and_outgrows_the_context(run, runs):
    command = "generate", runs / "causal-lm", "--tokens", 100, "--top-k", 5, "--temperature", 0.9
    texts = [run(*command, "--seed", seed)[1] for seed in (0, 1, 2, 3, 0)]
    assert texts[0] == texts[4] != texts[1]
    assert max(map(len, texts)) > 64  # twice the context; an untrained model may end a text early
    assert run("generate", runs / "causal-lm", "--prompt", "best of times, " * 5, "--tokens", 3)[0] == 0


def test_lines_begin_at_the_start_symbol(run, files):
    assert run(*training("causal-lm", files, files / "lines", "--by-line", "--hold-out", "0"))[0] == 0
    assert run_folder.opened(files / "lines").settings["by_line"] is True
    assert run("generate", files / "lines", "--prompt", "It", "--tokens", 5)[1].startswith("It")


def test_characters_that_the_run_never_saw_are_told(run, runs):
    sentence = "the run's vocabulary lacks {!r} of --prompt, which the text leaves out\n"
    code, out, err = run("generate", runs / "causal-lm", "--prompt", "It wäs ß\u65e5 ä", "--tokens", 2)
    assert code == 0 and out.startswith("It ws ") and err == sentence.format("äß\u65e5")
    code, _, err = run("generate", runs / "masked-lm", "--prompt", "a \u65e5<mask>")
    assert code == 0 and err == sentence.format("\u65e5")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tokens", "0"], "--tokens must be >= 1, got 0"),
        (["--temperature", "0"], "--temperature must be > 0, got 0.0; --greedy takes the most probable"),
        (["--temperature", "inf"], "--temperature must be a finite number, got inf"),
        (["--seed", "99999999999999999999999"], "--seed must be <= 18446744073709551615, got 99999999999999999999999"),
        (["--prompt", "\udcff"], "--prompt must be UTF-8 text, got byte 0xff in '\\udcff'"),
        (["--top-k", "0"], "--top-k must be >= 1, got 0"),
        (["--top-p", "1.5"], "--top-p must be in (0, 1], got 1.5"),
    ],
)
def test_a_bad_option_is_one_sentence(run, runs, arguments, sentence):
    refused(run("generate", runs / "causal-lm", *arguments), sentence)


def test_the_smallest_temperature_is_greedy(run, runs):
    texts = [
        run("generate", runs / "causal-lm", "--prompt", "It", "--tokens", 8, *how)
        for how in (["--temperature", "1e-300"], ["--greedy"])
    ]
    assert texts[0][0] == 0 and texts[0] == texts[1]


def test_a_masked_model_fills_in(run, runs):
    trained = run_folder.opened(runs / "masked-lm")
    vocabulary = trained.vocabularies["text"]
    code, out, err = run("generate", runs / "masked-lm", "--prompt", "a c<mask>t a<mask>d")
    text, *candidates = out.splitlines()
    assert (
        code == 0 and not err and len(candidates) == 2 and text[:3] == "a c" and text[4:7] == "t a" and text[8:] == "d"
    )
    ids = torch.tensor(
        [[START, *vocabulary.encode("a c"), MASK, *vocabulary.encode("t a"), MASK, *vocabulary.encode("d"), END]]
    )
    scores = trained.model(ids.to(trained.device)).detach()[0, 4, 5:].softmax(-1)
    assert candidates[0].startswith(f"{vocabulary.token(5 + int(scores.argmax()))!r} {float(scores.max()):.3f}, ")
    assert text[3] == vocabulary.token(5 + int(scores.argmax()))
    refused(run("generate", runs / "masked-lm", "--prompt", "a cat"), "--prompt must hold <mask>")
    refused(run("generate", runs / "masked-lm", "--prompt", "<mask>" * 40), "at most 32 tokens, got 42")


def test_another_tasks_run_is_one_sentence(run, runs):
    sentence = "holds a run of `train classify`; this needs one of `train causal-lm` or `train masked-lm`"
    refused(run("generate", runs / "classify"), sentence)
