"""A call that was accepted before is neither checked nor chosen for again; no other call may profit from that."""

import sys

import pytest
import torch

import tfm_kernels as tfk
from tfm_kernels import _backend, _library
from tfm_kernels.ops import ffn_call, layer_norm_call

ops = tfk.ops
PROCESSORS = (_library.XEON, _library.ZEN3, _library.ZEN4)


@pytest.fixture
def checked(monkeypatch):
    """The names of the ops whose arguments were checked, in order."""
    calls = []
    contract = __import__("sys").modules["tfm_kernels.ops.layer_norm"]

    def describe(op, *rest):
        calls.append(op)
        return layer_norm_call.describe(op, *rest)

    monkeypatch.setattr(contract, "describe", describe)
    _backend.Choices.forget()
    yield calls
    _backend.Choices.forget()


@pytest.fixture
def x():
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def test_the_same_call_is_checked_once(checked, x):
    w = torch.ones(8)
    for _ in range(3):
        ops.layer_norm(x, w)
        ops.add_layer_norm(x, x, w)
        ops.add_layer_norm(x, x, w, dropout_p=0.5)
        ops.rms_norm(x, w)
        ops.add_rms_norm(x, x, w)
        ops.add_layer_norm(x, x, w, dropout_p=0.5, dropout_rows=torch.arange(4))
        ops.add_rms_norm(x, x, w, dropout_rows=torch.arange(4))
    assert checked == [
        "layer_norm",
        *["add_layer_norm"] * 2,
        "rms_norm",
        "add_rms_norm",
        "add_layer_norm",
        "add_rms_norm",
    ]


def test_another_call_is_checked_anew(checked, x):
    w = torch.ones(8)
    calls = [
        lambda: ops.layer_norm(x, w),
        lambda: ops.layer_norm(x),
        lambda: ops.layer_norm(x, None, w),
        lambda: ops.layer_norm(x, w, eps=1e-6),
        lambda: ops.layer_norm(x, w, unbiased=True),
        lambda: ops.layer_norm(x, w, eps_outside=1e-6),
        lambda: ops.layer_norm(x[:2], w),
        lambda: ops.layer_norm(x.double(), w.double()),
        lambda: ops.layer_norm(x.bfloat16(), w),
        lambda: ops.layer_norm(x, w, backend="cpu"),
        lambda: ops.layer_norm(x.clone().requires_grad_(), w),
    ]
    for count, call in enumerate(calls, 1):
        call()
        assert len(checked) == count


REFUSED = {
    "eps is a bool": (TypeError, lambda x, w: ops.layer_norm(x, w, eps=True)),
    "eps_outside is negative": (ValueError, lambda x, w: ops.layer_norm(x, w, eps=1.0, eps_outside=-1.0)),
    "unbiased is an int": (TypeError, lambda x, w: ops.layer_norm(x, w, eps=1.0, unbiased=0)),
    "weight is too long": (ValueError, lambda x, w: ops.layer_norm(x, torch.ones(9), eps=1.0)),
    "weight is an integer": (ValueError, lambda x, w: ops.layer_norm(x, torch.ones(8, dtype=torch.int64), eps=1.0)),
    "weight is elsewhere": (ValueError, lambda x, w: ops.layer_norm(x, w.to("meta"), eps=1.0)),
    "x is a list": (TypeError, lambda x, w: ops.layer_norm(x.tolist(), w, eps=1.0)),
    "weight is a list": (TypeError, lambda x, w: ops.layer_norm(x, w.tolist(), eps=1.0)),
    "backend is a list": (ValueError, lambda x, w: ops.layer_norm(x, w, eps=1.0, backend=["cpu"])),
    "backend cannot": (tfk.BackendError, lambda x, w: ops.layer_norm(x, w, eps=1.0, backend="triton")),
    "residual is None": (TypeError, lambda x, w: ops.add_layer_norm(x, None, w, eps=1.0)),
    "dropout_p is a bool": (TypeError, lambda x, w: ops.add_layer_norm(x, x, w, eps=1.0, dropout_p=False)),
    "seed is an int": (TypeError, lambda x, w: ops.add_layer_norm(x, x, w, eps=1.0, dropout_p=0.0, seed=1)),
    "seed is float": (ValueError, lambda x, w: ops.add_rms_norm(x, x, w, eps=1.0, dropout_p=0.5, seed=x[0, 0])),
    "rows are too few": (
        ValueError,
        lambda x, w: ops.add_layer_norm(x, x, w, eps=1.0, dropout_p=0.5, dropout_rows=torch.arange(3)),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_stays_refused(x, name):
    """Before and after calls that look alike were accepted, in the same words."""
    error, call = REFUSED[name]
    w = torch.ones(8)
    _backend.Choices.forget()
    with pytest.raises(error) as first:
        call(x, w)
    for eps in (1.0, 1):
        ops.layer_norm(x, w, eps=eps, unbiased=False)
        ops.add_layer_norm(x, x, w, eps=eps, dropout_p=0.0)
        ops.add_layer_norm(x, x, w, eps=eps, dropout_p=0)
        ops.add_layer_norm(x, x, w, eps=eps, dropout_p=0.5)
        ops.add_rms_norm(x, x, w, eps=eps, dropout_p=0.5)
        ops.add_layer_norm(x, x, w, eps=eps, dropout_p=0.5, dropout_rows=torch.arange(4))
    for _ in range(2):
        with pytest.raises(error) as again:
            call(x, w)
        assert str(again.value) == str(first.value)


def test_row_numbers_of_the_random_rule_are_no_part_of_what_is_alike(x):
    """Calls that differ in them alone drop what their rows drop, and other shapes of them are refused."""
    seed, rows = torch.tensor(3), torch.arange(8)
    w1, w2 = torch.ones(8, 8), torch.eye(8)
    calls = {
        "ffn": lambda x, rows: ops.ffn(
            x, w1, None, w2, None, dropout_p=0.5, seed=seed, dropout_rows=rows, backend="cpu"
        ),
        "norm": lambda x, rows: ops.add_layer_norm(
            x, x, dropout_p=0.5, seed=seed, dropout_rows=rows, backend="cpu"
        )[1],
    }  # fmt: skip
    both = torch.cat([x, x])
    for call in calls.values():
        whole = call(both, rows)
        assert torch.equal(call(x, rows[:4]), whole[:4]) and torch.equal(call(x, rows[4:]), whole[4:])
        assert not torch.equal(whole[:4], whole[4:])
        for wrong in (rows, rows[:4].int(), rows[:4, None]):
            with pytest.raises(ValueError, match="dropout_rows must be"):
                call(x, wrong)


def test_use_backend_is_seen(x):
    x = x.requires_grad_()  # a small call with a gradient is aten's on all processors
    fused = lambda: "Fused" in ops.layer_norm(x).grad_fn.name()
    assert not fused() and not fused(), "a small call is aten's"
    with tfk.use_backend("cpu"):
        assert fused() and fused()
        with tfk.use_backend("aten"):
            assert not fused()
        assert fused()
    assert not fused()


@pytest.mark.parametrize("nearest", PROCESSORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_choice_depends_on_size_and_on_training(dtype, nearest, monkeypatch):
    """The rule, at both of its ends; the limits between are measured."""
    monkeypatch.setattr(_library, "nearest", nearest)
    small, large = torch.randn(2, 768, dtype=dtype), torch.randn(1024, 768, dtype=dtype)
    chosen = lambda op, *args, **kwargs: tfk.explain(op, *args, **kwargs).splitlines()[-1].split()[1]
    for op in ("layer_norm", "add_layer_norm"):
        residual = lambda x, op=op: (x,) if op.startswith("add") else ()
        assert chosen(op, small, *residual(small)) == "cpu"
        assert chosen(op, large, *residual(large)) == "cpu"
    trained = small.clone().requires_grad_(), large.clone().requires_grad_()
    assert [chosen("layer_norm", x) for x in trained] == ["aten", "cpu"]
    assert chosen("add_layer_norm", small, small, dropout_p=0.1) == "cpu"
    assert chosen("rms_norm", small) == "cpu" and chosen("layer_norm", small, unbiased=True) == "cpu"
    assert chosen("layer_norm", small, eps_outside=1e-6) == "cpu"


FFN_TRAINS = {
    _library.XEON: (1, 63, 64, 9000),
    _library.ZEN3: (1, 63, 512, 9000),
    _library.ZEN4: (1, 63, 512, 9000),
}
FFN_TRAINS_IN_16_BITS = {_library.XEON: (1, 511, 4096), _library.ZEN3: (8192,), _library.ZEN4: (1, 128, 8192)}
FFN_LEFT_IN_16_BITS = {_library.XEON: (512, 4095), _library.ZEN3: (1, 8191), _library.ZEN4: (129, 8191)}
FFN_INFERENCE_LEFT = {
    (_library.XEON, torch.float32): {3}, (_library.ZEN3, torch.float32): set(), (_library.ZEN4, torch.float32): set(),
    (_library.XEON, torch.bfloat16): set(), (_library.ZEN3, torch.bfloat16): set(),
    (_library.ZEN4, torch.bfloat16): {17, 20},
}  # fmt: skip


def ffn_takes(rows, dtype, width=8, hidden=0, training=True):
    """Whether automatic choice runs a feed-forward block, by default as wide inside, by the kernel for CPUs."""
    w1 = torch.ones(hidden or width, width, dtype=dtype, requires_grad=training)
    weights = w1, None, torch.ones(width, hidden or width, dtype=dtype), None
    return "-> cpu" in tfk.explain("ffn", torch.ones(rows, width, dtype=dtype), *weights)


@pytest.mark.parametrize("nearest", PROCESSORS)
def test_ffn_leaves_pytorch_training_that_it_does_faster(nearest, monkeypatch):
    monkeypatch.setattr(_library, "nearest", nearest)
    for products in ("bf16_tiles", "f16_products"):
        monkeypatch.setattr(_library, products, True)
    for dtype, taken, left in (
        (torch.float32, FFN_TRAINS, dict.fromkeys(PROCESSORS, ())),
        (torch.bfloat16, FFN_TRAINS_IN_16_BITS, FFN_LEFT_IN_16_BITS),
        (torch.float16, FFN_TRAINS_IN_16_BITS, FFN_LEFT_IN_16_BITS),
    ):
        assert [rows for rows in taken[nearest] if not ffn_takes(rows, dtype)] == []
        assert [rows for rows in left[nearest] if ffn_takes(rows, dtype)] == []


@pytest.mark.parametrize("nearest", PROCESSORS)
def test_ffn_trains_wide_layers_in_16_bits_where_their_size_decides(nearest, monkeypatch):
    monkeypatch.setattr(_library, "nearest", nearest)
    monkeypatch.setattr(_library, "bf16_tiles", True)
    assert not ffn_takes(512, torch.bfloat16, 511)
    assert ffn_takes(512, torch.bfloat16, 512) is (nearest == _library.XEON)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("nearest", PROCESSORS)
def test_ffn_leaves_pytorch_a_narrow_hidden_activation(nearest, training, monkeypatch):
    """As of adapters, of many rows, but not in types that PyTorch emulates."""
    monkeypatch.setattr(_library, "nearest", nearest)
    few, always = (256, not training) if nearest == _library.ZEN3 else (64, False)
    for native in (False, True):
        monkeypatch.setattr(_library, "bf16_tiles", native)
        for dtype, rows in ((torch.float32, few), (torch.bfloat16, 256)):
            emulated = dtype == torch.bfloat16 and not native
            assert ffn_takes(rows, dtype, 512, 256, training) is (emulated or always)
            assert emulated or not training or not ffn_takes(rows, dtype, 510, 255, training)
    assert ffn_takes(few - 1, torch.float32, 512, 256, training)
    assert ffn_takes(few, torch.float32, 512, 257, training)
    assert training or ffn_takes(few, torch.float32, 510, 255, training)


@pytest.mark.parametrize(("nearest", "dtype"), FFN_INFERENCE_LEFT, ids=str)
def test_ffn_leaves_pytorch_few_rows_without_gradients(nearest, dtype, monkeypatch):
    monkeypatch.setattr(_library, "nearest", nearest)
    weights = torch.ones(16, 8, dtype=dtype), None, torch.ones(8, 16, dtype=dtype), None
    takes = lambda rows: "-> cpu" in tfk.explain("ffn", torch.ones(rows, 8, dtype=dtype), *weights)
    rows = (1, 2, 3, 4, 16, 17, 20, 21, 512, 9000)
    assert {m for m in rows if not takes(m)} == FFN_INFERENCE_LEFT[nearest, dtype]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_ffn_leaves_pytorch_few_rows_of_weights_that_it_would_copy(gated, training, monkeypatch):
    """As GPT-2's, which lie (in, out); but not in types that PyTorch emulates."""
    monkeypatch.setattr(_library, "nearest", _library.ZEN3)
    monkeypatch.setattr(_library, "bf16_tiles", False)

    def backends(dtype, rows):
        lying, x = torch.ones(8, 8, dtype=dtype, requires_grad=training), torch.ones(rows, 8, dtype=dtype)
        turned = [lying.t() if turn else lying for turn in (gated, True, False)]
        weights = turned[0 if gated else 1], None, turned[2 if gated else 1], None
        more = {"gate": turned[2]} if gated else {}
        answers = [tfk.explain("ffn", x, *weights, **more), tfk.explain("ffn", x, lying, None, lying, None, **more)]
        return ["cpu" if "-> cpu" in answer else "aten" for answer in answers]

    for rows in (1, 255, 256):
        assert backends(torch.float32, rows) == ["aten" if rows < 256 else "cpu", "cpu"]
        assert backends(torch.bfloat16, rows) == ["cpu", "cpu"]


def test_ffn_remembers_how_weights_lie(monkeypatch):
    """Calls that are alike but for it, in turn: each is described once, and not taken for the other."""
    x, w, seen = torch.ones(1, 9), torch.ones(9, 9), []
    describe = lambda *args, **more: seen.append(args[1]) or ffn_call.describe(*args, **more)
    monkeypatch.setattr(sys.modules["tfm_kernels.ops.ffn"], "describe", describe)
    for _ in range(2):
        for w1 in (w, w.t()):
            tfk.ops.ffn(x, w1, None, w, None, activation="silu")
    assert [each.is_contiguous() for each in seen] == [True, False]


@pytest.mark.parametrize("nearest", PROCESSORS)
def test_ffn_trains_float16_from_few_rows_where_pytorch_emulates_it(nearest, monkeypatch):
    monkeypatch.setattr(_library, "nearest", nearest)
    few = nearest != _library.XEON
    monkeypatch.setattr(_library, "f16_products", False)
    assert [ffn_takes(rows, torch.float16) for rows in (1, 3, 4, 512)] == [few, few, True, True]


def test_the_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(_backend.Choices, "LIMIT", 3)
    choices = _backend.Choices()
    for key in range(10):
        assert choices.keep(bytes([key]), "cpu") == "cpu"
        assert choices.get(bytes([key])) == "cpu" and len(choices._made) <= 3
    assert choices.get(None) is None and choices.keep(None, "cpu") == "cpu" and choices.get(None) is None


def test_a_choice_made_before_forget_is_not_kept():
    """As when another thread leaves use_backend() between the choice and its keeping."""
    choices = _backend.Choices()
    assert choices.get(b"key") is None
    _backend.Choices.forget()
    assert choices.keep(b"key", "reference") == "reference" and choices.get(b"key") is None
    assert choices.keep(b"key", "aten") == "aten" and choices.get(b"key") == "aten"


def test_compiled_code_neither_reads_nor_writes_it(x):
    _backend.Choices.forget()
    compiled = torch.compile(lambda x: ops.layer_norm(x) + ops.rms_norm(x), fullgraph=True, backend="eager")
    expected = ops.layer_norm(x) + ops.rms_norm(x)
    _backend.Choices.forget()
    torch.testing.assert_close(compiled(x), expected)
    assert not any(choices._made for choices in _backend.Choices._all)


def test_symbolic_sizes_are_checked():
    """Sizes that make_fx does not know yet cannot be a key; the call must work without."""
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda x: ops.layer_norm(x, backend="aten"), tracing_mode="symbolic")(torch.randn(3, 8))
    assert graph(torch.randn(5, 8)).shape == (5, 8)


def operators(graph):
    """The names of this package's operators in a graph."""
    return {node.target.name() for node in graph.nodes if str(node.target).startswith("tfm_kernels.")}


def compiled_operators(call, x, dynamic):
    """The operators in what compiled code makes of call(x); its result must be that of the call itself."""
    found = set()

    def read(module, _):
        found.update(operators(module.graph))
        return module.forward

    torch.compiler.reset()
    given = x.clone()
    if dynamic:
        torch._dynamo.mark_dynamic(given, 0)
    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend=read)(given), call(x))
    return found


def integers(*shape):
    return torch.arange(shape[0] * shape[1], dtype=torch.int8).view(shape) - 20, torch.full(shape[:1], 0.01)


INT8 = {
    "int8_linear_fwd_cpu": lambda x: ops.int8_linear(x, *integers(6, 8)),
    "int8_ffn_fwd_cpu": lambda x: ops.int8_ffn(x, *integers(6, 8), None, *integers(3, 6), None, dynamic=True),
}


@pytest.mark.parametrize("kernel", INT8)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_keeps_weights_of_8_bits_as_they_are(kernel, dynamic, x):
    """PyTorch's functions would write them out as floats at every call."""
    assert compiled_operators(INT8[kernel], x, dynamic) == {f"tfm_kernels::{kernel}"}


@pytest.mark.parametrize("nearest", PROCESSORS)
def test_compiled_code_takes_the_linear_kernel_of_few_rows_that_it_knows(nearest, x, monkeypatch):
    monkeypatch.setattr(_library, "nearest", nearest)
    weight, row = torch.ones(6, 8), torch.ones(1, 512)
    large = torch.ones(256, 512)
    assert compiled_operators(lambda x: ops.linear(x, weight), x, False) == {"tfm_kernels::linear_fwd_cpu"}
    assert compiled_operators(lambda x: ops.linear(x, large), row, False) == {"tfm_kernels::linear_fwd_cpu"}
    always = {"tfm_kernels::linear_fwd_cpu"} if nearest == _library.ZEN3 else set()  # from two rows on
    assert compiled_operators(lambda x: ops.linear(x, weight), x, True) == always, "bound to a range of rows"
    assert compiled_operators(lambda x: ops.linear(x, weight), x.repeat(200, 1), False) == always


@pytest.mark.parametrize("kernel", [*INT8, "linear_fwd_cpu"])
@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_run_where_this_package_is_not(kernel, strict, x):
    class Step(torch.nn.Module):
        def forward(self, x):
            return INT8[kernel](x) if kernel in INT8 else ops.linear(x, torch.ones(6, 8))

    program = torch.export.export(Step(), (x,), strict=strict)
    assert not operators(program.graph)
    torch.testing.assert_close(program.module()(x), Step()(x))
