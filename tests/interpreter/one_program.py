"""One program of a Triton kernel alone: the last of a grid that the interpreter would take hours for."""

import numpy as np
from triton.runtime import interpreter


def run_program(monkeypatch, kernel, *programs, **arguments):
    """Runs the program of these numbers along the grid's axes; arguments that are not given are None."""
    ids = [interpreter.TensorHandle(np.array([i], dtype=np.int32), interpreter.tl.int32) for i in (*programs, 0, 0)]
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_get_program_id", lambda self, axis: ids[axis])
    kernel[(1,)](**{**dict.fromkeys(kernel.arg_names), **arguments})
