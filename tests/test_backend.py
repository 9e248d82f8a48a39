"""How a backend is chosen, forced, refused and explained."""

import threading
from fractions import Fraction
from importlib.util import find_spec

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tfm_kernels as tfk
from tfm_kernels import _backend, _library


@pytest.fixture
def x():
    return torch.randn(2, 8)


def test_explicit_never_falls_back(x):
    for backend in ("triton", "cuda"):
        words = f"layer_norm: backend '{backend}' cannot run this call: needs a CUDA tensor, got cpu"
        with pytest.raises(tfk.BackendError, match=f"^{words}$"):
            tfk.ops.layer_norm(x, backend=backend)
    with pytest.raises(tfk.BackendError, match="N - 1 variance"):
        tfk.ops.layer_norm(x, unbiased=True, backend="aten")
    with pytest.raises(tfk.BackendError, match="no eps outside of the root"):
        tfk.ops.rms_norm(x, eps_outside=1e-6, backend="aten")


def test_unknown_backend(x):
    with pytest.raises(
        ValueError, match="backend must be one of reference, aten, cpu, triton, cuda or None, got 'gpu'"
    ):
        tfk.ops.layer_norm(x, backend="gpu")
    with pytest.raises(ValueError, match="use_backend: name must be one of"):
        with tfk.use_backend("gpu"):
            pass


def test_use_backend_is_scoped_and_survives_errors(x):
    with tfk.use_backend("reference"):
        assert "-> reference (use_backend() asks for it)" in tfk.explain("layer_norm", x)
        with tfk.use_backend("aten"):
            assert "-> aten" in tfk.explain("layer_norm", x)
        assert "-> reference" in tfk.explain("layer_norm", x)
    with pytest.raises(RuntimeError, match="mine"), tfk.use_backend("reference"):
        raise RuntimeError("mine")
    assert _backend._forced is None


def test_blocks_of_several_threads_may_overlap():
    """Whichever is left first; nothing stays set when all are left."""
    for first_out in (0, 1):
        inside = [threading.Event(), threading.Event()]
        leave = [threading.Event(), threading.Event()]

        def block(n, name, inside=inside, leave=leave):
            with tfk.use_backend(name):
                inside[n].set()
                leave[n].wait(10)

        threads = [threading.Thread(target=block, args=given) for given in ((0, "reference"), (1, "aten"))]
        for thread, entered in zip(threads, inside, strict=True):
            thread.start()
            assert entered.wait(10)
        assert _backend.forced() == "aten", "the one entered last"
        leave[first_out].set()
        threads[first_out].join(10)
        assert _backend.forced() == ("aten", "reference")[first_out]
        leave[1 - first_out].set()
        threads[1 - first_out].join(10)
        assert _backend.forced() is None and not _backend._entered


def test_use_backend_is_read_by_compiled_code(x):
    compiled = torch.compile(lambda t: tfk.ops.layer_norm(t) + 1, fullgraph=True, backend="eager")
    plain = compiled(x)
    with tfk.use_backend("reference"):
        torch.testing.assert_close(compiled(x), plain)
        with tfk.use_backend("triton"), pytest.raises(Exception, match="cannot run this call"):
            compiled(x)


def test_argument_beats_use_backend(x):
    with tfk.use_backend("triton"), pytest.raises(tfk.BackendError):
        tfk.ops.layer_norm(x)
    with tfk.use_backend("triton"):
        assert tfk.ops.layer_norm(x, backend="cpu").shape == x.shape


def test_a_call_remembers_its_backend_for_its_backward(x):
    x.requires_grad_()
    with tfk.use_backend("cpu"):
        y = tfk.ops.layer_norm(x)
    assert "Fused" in y.grad_fn.name()
    with tfk.use_backend("reference"):
        y.sum().backward()
    assert x.grad is not None


def test_explain_lists_every_backend_and_the_choice(x):
    text = tfk.explain("layer_norm", x, unbiased=True)
    for backend in _backend.BACKENDS:
        assert backend in text
    assert "aten      cannot: PyTorch's layer_norm has no N - 1 variance" in text
    assert text.splitlines()[-1].startswith("  -> ")
    entry = _backend.OPS["layer_norm"]
    told = {8192: "proven on an H200", 8200: "not proven on a GPU with gradients", 4097: "not proven on a GPU"}
    for features, words in told.items():
        call = _backend.described("explain", entry, (x.new_empty(4, features).requires_grad_(),), {})
        assert entry.remark("triton", call).startswith(words)
    for name in ("layernorm", "attention_weights"):  # the latter has no backends to choose from
        words = f"explain: op must be one of .*layer_norm.*, the functions that take backend=, got '{name}'"
        with pytest.raises(ValueError, match=words):
            tfk.explain(name, x)
    with tfk.use_backend("triton"), pytest.raises(tfk.BackendError, match="cannot run this call"):
        tfk.explain("layer_norm", x)
    with pytest.raises(ValueError, match="layer_norm: weight must have shape"):
        tfk.explain("layer_norm", x, torch.ones(3))


@pytest.mark.parametrize("ask", ["explain", "tune"])
def test_arguments_that_do_not_fit_an_op_are_a_sentence_that_names_both(ask):
    q = torch.randn(1, 2, 3, 8)

    def call(*args, **kwargs):
        tfk.explain("attention", *args, **kwargs) if ask == "explain" else tfk.tune("attention", kwargs or args)

    names = f"^{ask}: the arguments of attention must be query, key, value, mask, bias, scale, .*, got a call with "
    for args, kwargs, what in (
        ((), {}, "missing a required argument: 'query'"),
        ((q, q), {}, "missing a required argument: 'value'"),
        ((), {"query": q, "keys": q}, "missing a required argument: 'key'"),
        ((q, q, q, None, None), {}, "too many positional arguments"),
    ):
        with pytest.raises(TypeError, match=names + what):
            call(*args, **kwargs)


def test_cpu_says_what_it_needs():
    meta = torch.empty(2, 8, device="meta")
    with pytest.raises(tfk.BackendError, match="needs a CPU tensor, got meta"):
        tfk.ops.layer_norm(meta, backend="cpu")


def test_cuda_is_explained_and_not_chosen_on_any_gpu(x):
    """On a GPU that is not there; that its kernels run is shown in tests/simt."""
    assert "cuda      cannot: needs a CUDA tensor, got cpu\n" in tfk.explain("layer_norm", x)
    with FakeTensorMode():
        text = tfk.explain("layer_norm", torch.empty(2, 8, device="cuda"))
        assert "-> aten (automatic choice)" in text
        if _library.cuda_extension is None:
            assert "cuda      cannot: the CUDA extension was not built" in text
        else:
            assert "cuda      can: proven on an H200 (9.0); on other GPUs name it explicitly" in text
        for y, reason in (
            (torch.empty(2, 8, device="cuda", dtype=torch.float64), "has no float64 kernels"),
            (torch.empty(2, 65537, device="cuda"), "needs at most 65536 features, got 65537"),
        ):
            with pytest.raises(tfk.BackendError, match=f"backend 'cuda' cannot run this call: {reason}"):
                tfk.ops.layer_norm(y, backend="cuda")


def test_ffns_cuda_kernels_are_explained_and_not_chosen_on_any_gpu():
    def call(device, dtype=torch.float32):
        shapes = (2, 8), (16, 8), (8, 16)
        x, w1, w2 = (torch.empty(shape, device=device, dtype=dtype) for shape in shapes)
        return x, w1, None, w2, None

    assert "cuda      cannot: needs a CUDA tensor, got cpu\n" in tfk.explain("ffn", *call("cpu"))
    with pytest.raises(tfk.BackendError, match="backend 'cuda' cannot run this call: needs a CUDA tensor, got cpu"):
        tfk.ops.ffn(*call("cpu"), backend="cuda")
    with FakeTensorMode():
        text = tfk.explain("ffn", *call("cuda"))
        assert "-> aten (automatic choice)" in text
        if _library.cuda_extension is None:
            assert "cuda      cannot: the CUDA extension was not built" in text
        else:
            assert "cuda      can: proven on an H200 (9.0); on other GPUs name it explicitly" in text
        with pytest.raises(tfk.BackendError, match="backend 'cuda' cannot run this call: has no float64 kernels"):
            tfk.ops.ffn(*call("cuda", torch.float64), backend="cuda")


def test_cuda_attention_is_explained_and_not_chosen_on_any_gpu():
    q = torch.randn(1, 2, 4, 8)
    assert "cuda      cannot: needs a CUDA tensor, got cpu\n" in tfk.explain("attention", q, q, q)
    words = "^attention: backend 'cuda' cannot run this call: needs a CUDA tensor, got cpu$"
    with pytest.raises(tfk.BackendError, match=words):
        tfk.ops.attention(q, q, q, backend="cuda")
    with FakeTensorMode():
        q = torch.empty(1, 2, 4, 8, device="cuda")
        text = tfk.explain("attention", q, q, q)
        assert "-> aten (automatic choice)" in text
        if _library.cuda_extension is None:
            assert "cuda      cannot: the CUDA extension was not built" in text
        else:
            assert "cuda      can: proven on an H200 (9.0); on other GPUs name it explicitly" in text


def test_triton_is_explained_and_not_chosen_on_any_gpu():
    """On a GPU that is not there; that its kernels run is shown in tests/interpreter."""
    with FakeTensorMode():
        x = torch.empty(2, 8, device="cuda")
        text = tfk.explain("layer_norm", x)
        assert "-> aten (automatic choice)" in text
        if find_spec("triton") is None:
            assert "triton    cannot: triton is not installed: pip install triton" in text
        else:
            assert "triton    can: proven on an H200 (9.0); on other GPUs name it explicitly" in text
        for x, reason in (
            (torch.empty(2, 8, device="cuda", dtype=torch.float64), "has no float64 kernels"),
            (torch.empty(2, 65537, device="cuda"), "needs at most 65536 features, got 65537"),
        ):
            with pytest.raises(tfk.BackendError, match=f"backend 'triton' cannot run this call: {reason}"):
                tfk.ops.layer_norm(x, backend="triton")


@pytest.mark.parametrize("backend", ["cpu", "aten", "reference"])
def test_numbers_of_numpy_are_numbers(backend):
    """As for torch: an eps or a probability may come out of a computation."""
    x, third = torch.randn(2, 3, 8, requires_grad=True), numpy.float32(0.25)
    calls = {
        "layer_norm": lambda number: tfk.ops.layer_norm(x, eps=number, backend=backend),
        "attention": lambda number: tfk.ops.attention(x[None], x[None], x[None], scale=number, backend=backend),
        "linear_cross_entropy": lambda number: tfk.ops.linear_cross_entropy(
            x[0], x[1], torch.tensor([0, 1, 2]), label_smoothing=number, backend=backend
        ),
    }  # fmt: skip
    for name, call in calls.items():
        assert torch.equal(call(third), call(0.25)), name
        assert torch.equal(*(torch.autograd.grad(call(number).sum(), x)[0] for number in (third, 0.25))), name
    with pytest.raises(TypeError, match="eps must be a number, got Fraction"):
        tfk.ops.layer_norm(x, eps=Fraction(1, 4), backend=backend)


def test_explain_says_the_same_of_a_call_that_names_its_backend():
    x = torch.randn(2, 8)
    assert tfk.explain("layer_norm", x, backend="aten") == tfk.explain("layer_norm", x)
