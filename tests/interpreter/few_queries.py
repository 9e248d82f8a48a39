"""Attention's forward of few queries, taken by calls that are small enough for the interpreter."""

from contextlib import contextmanager

import pytest

from tfm_kernels.triton import _attention_call, _attention_fwd_few


@contextmanager
def taken():
    """Every call of up to 1,000 queries takes it, with a part for each tile of keys; gives the launches' arguments."""
    launches = []
    launch = _attention_call.Call.launch

    def told(call, kernel, programs, config, **more):
        launches.append((kernel.fn.__name__, config, call))
        launch(call, kernel, programs, config, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_attention_fwd_few, "FEW", 1000)
        patch.setattr(_attention_fwd_few, "MANY", 0)
        patch.setattr(_attention_fwd_few, "BEGIN", 0)
        patch.setattr(_attention_fwd_few, "MERGE", 0)
        patch.setattr(_attention_call.Call, "launch", told)
        yield launches
    forward = {name for name, _, call in launches if call.op == "attention_fwd_triton" and call.keys}
    assert forward <= {"attention_fwd_few_kernel", "attention_fwd_merge_kernel"}, forward
