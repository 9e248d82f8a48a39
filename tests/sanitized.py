"""Runs the C++ kernels forward and backward on a reduced case list; meant for a build with sanitizers.

It judges nothing: a finding of the sanitizer ends the process. Numbers are judged by tests/ops/test_contract.py.

    python -m tests.sanitized
"""

import itertools

import torch

import tfm_kernels as tfk
from tests.cases import CASES, run_case

EVERY = 12


def main() -> None:
    """Every twelfth case of the contract list, the linear layers, attention_step, rotary, and a word about how many."""
    torch.set_num_threads(2)
    count = 0
    for case in CASES[::EVERY]:
        run_case(case, "cpu")
        count += 1
    with torch.no_grad():
        for rows in (1, 8, 9, 33, 300):
            for dtype in (torch.float32, torch.bfloat16):
                x, weight, bias = (torch.randn(*shape, dtype=dtype) for shape in ((rows, 70), (537, 70), (537,)))
                tfk.ops.linear(x, weight, bias, backend="cpu")
                first, second = whole(537, 70), whole(33, 537)
                for dynamic in (False, True):
                    tfk.ops.int8_linear(x, *first, bias, dynamic=dynamic, backend="cpu")
                gate = dict(zip(("gate", "gate_scale"), whole(537, 70), strict=True))
                for gated, dynamic in itertools.product(({}, gate), (False, True)):
                    more = {"activation": "gelu", "dynamic": dynamic, "backend": "cpu", **gated}
                    tfk.ops.int8_ffn(x, *first, bias, *second, None, **more)
                count += 7
        torch.set_num_threads(1)  # else what one thread writes too much lies in another's share of the working memory
        x, weight = (torch.randn(rows, 4100, dtype=torch.float16) for rows in (33, 50))
        tfk.ops.linear(x, weight, backend="cpu")
        tfk.ops.ffn(x, weight, None, weight[:, :50].contiguous(), None, gate=weight, backend="cpu")
        torch.set_num_threads(2)
        count += 2
        for dtype, grows in itertools.product((torch.float32, torch.bfloat16), (True, False)):
            given = [torch.randn(*shape, dtype=dtype) for shape in ((9, 1, 24), (72, 24), (72,), (7, 24), (7,))]
            kept = [torch.randn(9 if grows else 3, 3, 11, 8, dtype=dtype) for _ in range(2)]
            torch.ops.tfm_kernels.attention_step_cpu(*given, *kept, 11, grows, None)
            count += 1
    for dtype, rows in itertools.product((torch.float32, torch.bfloat16), (3, 70)):  # a gate with a bias
        shapes = {"x": (rows, 24), "w1": (70, 24), "b1": (140,), "w2": (7, 70), "b2": (7,), "gate": (70, 24)}
        given = {name: torch.randn(shape, dtype=dtype, requires_grad=True) for name, shape in shapes.items()}
        for again in (False, True):
            y = tfk.ops.ffn(**given, activation="silu", recompute=again, backend="cpu")
            torch.autograd.grad(y.sum(), list(given.values()))
            count += 1
    for dtype, interleaved in itertools.product((torch.float32, torch.bfloat16), (True, False)):
        x = torch.randn(2, 3, 5, 70, dtype=dtype, requires_grad=True)
        y = tfk.ops.rotary(x, *torch.randn(2, 2, 5, 34, dtype=dtype), interleaved=interleaved, backend="cpu")
        torch.autograd.grad(y.sum(), x)
        count += 1
    print(f"{count} passed, 0 failed")


def whole(out: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight of integers and the sizes of their steps."""
    return torch.randint(-128, 128, (out, width), dtype=torch.int8), torch.rand(out)


if __name__ == "__main__":
    main()
