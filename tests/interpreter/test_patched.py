"""A patched Llama whose layers run on Triton's kernels, interpreted: by patch(backend=...) and by use_backend()."""

import copy
from collections import Counter
from contextlib import nullcontext

import pytest

import tfm_kernels as tfk
from tests.patching.models import assert_as_exact_as_before, batch, results
from tests.patching.test_patch_families import build, run_of
from tfm_kernels.triton import rotary_bwd, rotary_fwd


@pytest.fixture
def turns(monkeypatch):
    """How often each of rotary's launchers was called."""
    counts = Counter()

    def counted(module, name):
        launch = getattr(module, name)

        def call(*arguments):
            counts[name] += 1
            return launch(*arguments)

        monkeypatch.setattr(module, name, call)

    counted(rotary_fwd, "rotary_fwd")
    counted(rotary_bwd, "rotary_bwd")
    return counts


@pytest.mark.parametrize("way", ["patch", "use_backend"])
def test_llama_turns_queries_and_keys_by_tritons_kernels(way, turns):
    """In each of two layers, forward and backward, and nothing falls back."""
    model, run = build("llama"), run_of("llama")
    exact = results(copy.deepcopy(model).double(), run)
    within = tfk.use_backend("triton") if way == "use_backend" else nullcontext()
    with within:
        assert_as_exact_as_before(model, run, exact, backend="triton" if way == "patch" else None)
    assert turns == {"rotary_fwd": 4, "rotary_bwd": 4}


def test_decoding_too(turns):
    model = build("llama")
    ids, _ = batch(rows=1, lengths=(7,))
    told = dict(max_new_tokens=3, do_sample=False, pad_token_id=0)
    wanted = model.generate(ids, **told)
    with tfk.patch(model, backend="triton"):
        assert model.generate(ids, **told).equal(wanted)
    assert turns == {"rotary_fwd": 3 * 4}
