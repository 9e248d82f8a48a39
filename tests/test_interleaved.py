"""Interleaved timing: turns, short calls within a sample, the wait for a device, and what the rounds say."""

import time

import pytest

from tfm_kernels import interleaved


def test_short_calls_are_repeated_as_often_for_all_and_each_sample_waits():
    done = []
    calls = {
        "short": lambda: (done.append("short"), time.sleep(0.001)),
        "long": lambda: (done.append("long"), time.sleep(0.002)),
    }
    rounds = interleaved.race_calls(calls, 0.0, 3, least=0.01, wait=lambda: done.append("wait"))
    samples = [part.split() for part in " ".join(done).split("wait")]
    assert not samples.pop()
    raced = samples[-2 * 4 :]  # a warm-up and three rounds
    times = len(raced[0])
    assert 2 <= times <= 10 and all(len(sample) == times and len(set(sample)) == 1 for sample in raced)
    assert [sample[0] for sample in raced[2:]] == ["short", "long", "long", "short", "short", "long"]
    assert len(rounds) == 3 and all(0.001 <= taken["short"] < 0.01 * times for taken in rounds)
    assert min(taken["short"] for taken in rounds) < 0.005, "of one call, not of a sample"


def test_a_long_call_is_run_once_in_a_sample():
    done = []
    interleaved.race_calls({"a": lambda: (done.append("a"), time.sleep(0.002))}, 0.0, 3, least=0.001)
    assert len(done) == 1 + 2 + 1 + 3


def test_what_the_rounds_say():
    rounds = [{"a": 2.0, "b": 1.0}, {"a": 30.0, "b": 10.0}, {"a": 4.0, "b": 1.0}]
    assert interleaved.median(rounds, "a") == 4.0
    assert interleaved.ratios(rounds, "a", "b") == pytest.approx([2.0, 3.0, 4.0])
