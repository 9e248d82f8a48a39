"""prove() of a model under torch.compile: what only compiled code gets wrong fails, and what did not run is said."""

import gc
import weakref

import pytest
import torch
from torch import nn

import tfm_kernels as tfk
from tests.test_proof_patch import encoder, padded
from tfm_kernels.proof import compiled, prove_patched

NOT_RUN = "it was not run under torch.compile"


def rows(report):
    """The compiled form's rows, by kind and tensor."""
    return {(row.kind, row.module, row.tensor): row for row in report.rows if "compiled" in row.tensor}


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_padded_encoder_runs_packed_and_compiled(dtype):
    report = tfk.prove(encoder().eval(), padded(), dtype=dtype, compile=True)
    assert report.passed, report.table()
    plain = {(row.kind, row.module, row.tensor) for row in report.rows if row.kind in ("output", "gradient")}
    plain = {each for each in plain if "compiled" not in each[2] and "called again" not in each[2]}
    renamed = {(kind, module, tensor.replace(", compiled", "")) for kind, module, tensor in rows(report)}
    assert renamed == plain and len(plain) > 20
    assert any("torch.compile made " in note for note in report.notes)


def test_a_frozen_model_keeps_its_packed_weights_compiled():
    model = encoder().eval()
    tfk.patch(model, freeze=True)
    report = tfk.prove(model, padded(), compile=True)
    assert report.passed and ("output", "", "output, compiled, no_grad") in rows(report), report.table()


class Wrong(nn.Module):
    """A linear layer whose compiled code alone errs: in what it returns, or in its gradient."""

    def __init__(self, linear, what):
        super().__init__()
        self.weight, self.bias, self.what = linear.weight, linear.bias, what

    def forward(self, x):
        y = nn.functional.linear(x, self.weight, self.bias)
        if not torch.compiler.is_compiling():
            return y
        if self.what == "gradient":
            return y + 0.01 * (y - y.detach())
        return y * 1.01 if (self.what == "no_grad") != torch.is_grad_enabled() else y


@pytest.mark.parametrize(
    ("what", "failing"),
    [
        ("no_grad", {("output", "", "output, compiled, no_grad")}),
        ("output", {("output", "", "output, compiled")}),
        ("gradient", {("gradient", "0", f"gradient of {name}, compiled") for name in ("weight", "bias")}),
    ],
)
def test_what_compiled_code_alone_gets_wrong_fails(what, failing):
    def patch(model):
        model[0] = Wrong(model[0], what)

    report = prove_patched(small().eval(), torch.randn(16, 8), patch=patch, compile=True)
    failed = {(row.kind, row.module, row.tensor) for row in report.failures}
    assert failing <= failed and all("compiled" in tensor for _, _, tensor in failed), report.table()
    assert prove_patched(small().eval(), torch.randn(16, 8), patch=patch).passed


def test_buffers_that_compiled_code_changes_are_compared():
    report = tfk.prove(small().train(), torch.randn(16, 8), compile=True)
    assert report.passed, report.table()
    assert {("buffer", "2", f"buffer of {name}, compiled") for name in ("running_mean", "running_var")} <= set(
        rows(report)
    )


def by_torch_compile(model):
    return torch.compile(model)


def by_its_method(model):
    model.compile()
    return model


def in_part(model):
    model[3] = torch.compile(model[3])
    return model


@pytest.mark.parametrize("come", [by_torch_compile, by_its_method, in_part])
def test_a_model_that_comes_compiled_is_proven_so(come):
    model = come(small().eval())
    x = torch.randn(5, 8)
    report = tfk.prove(model, x)
    assert report.passed and ("output", "", "output, compiled") in rows(report), report.table()
    assert report.model == "Sequential" and report.replaced == ["0", "3"]
    assert not rows(tfk.prove(model, x, compile=False))
    assert compiled.is_compiled(model), "the user's own stays as it is"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_drops_the_same_compiled(dtype):
    report = tfk.prove(encoder().train(), padded(), dtype=dtype, compile=True)
    assert report.passed and len(rows(report)) > 20, report.table()
    assert any("its dropout drops" in note for note in report.notes), report.notes
    assert not any("its dropout drops" in note for note in tfk.prove(encoder().eval(), padded(), compile=True).notes)


class Several(nn.Module):
    """Dropouts of PyTorch's own and fused ones, in an order that a compiler has reasons to change."""

    def __init__(self, between=None):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.25, batch_first=True)
        self.first, self.second, self.between = nn.Linear(16, 16), nn.Linear(16, 16), between

    def forward(self, x):
        early, late = nn.functional.dropout(x, 0.3), nn.functional.dropout(x.roll(1, 0), 0.5)
        y = self.second(late) + self.attention(early, early, early, need_weights=False)[0]
        y = y if self.between is None else self.between(y)
        scores = nn.functional.scaled_dot_product_attention(y, y, y, dropout_p=0.4)
        return nn.functional.dropout1d(self.first(early), 0.2), nn.functional.alpha_dropout(scores, 0.3)


@torch.compiler.disable
def _left_alone(y):
    return nn.functional.dropout(y, 0.5)


@pytest.mark.parametrize("between", [None, _left_alone], ids=["one graph", "between graphs"])
def test_dropouts_of_any_kind_keep_their_order(between):
    torch.manual_seed(0)
    report = tfk.prove(Several(between).train(), torch.randn(6, 7, 16), compile=True)
    assert report.passed and ("output", "", "output.1, compiled") in rows(report), report.table()
    graphs = [note for note in report.notes if "torch.compile made" in note]
    assert ("2 graphs" if between else "1 graph ") in graphs[0]


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_is_drawn_again_where_a_part_is_computed_again(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

        def part(self, x):
            return nn.functional.dropout(self.norm(nn.functional.dropout(x, 0.3)).sin(), 0.4)

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.part, self.first(x), use_reentrant=reentrant)

    report = tfk.prove(Checkpointed().train(), torch.randn(6, 16), compile=True)
    assert report.passed and ("gradient", "first", "gradient of weight, compiled") in rows(report), report.table()


def test_a_wrong_dropout_of_compiled_code_alone_fails():
    class Drops(nn.Module):
        def forward(self, x):
            return nn.functional.dropout(x, 0.25 if torch.compiler.is_compiling() else 0.5)

    report = tfk.prove(nn.Sequential(nn.LayerNorm(16), Drops()).train(), torch.randn(6, 16), compile=True)
    assert report.failures and all("compiled" in row.tensor for row in report.failures), report.table()


@pytest.mark.parametrize("graph", [False, True], ids=["always", "with a graph"])
def test_random_numbers_for_more_than_dropout_are_left_out_and_said(graph):
    class Noise(nn.Module):
        def forward(self, x):
            return x + torch.rand_like(x) if torch.is_grad_enabled() or not graph else nn.functional.dropout(x)

    report = tfk.prove(nn.Sequential(nn.LayerNorm(16), Noise()).train(), torch.randn(6, 16), compile=True)
    assert report.passed and not rows(report), report.table()
    assert any(NOT_RUN in note and "rand" in note for note in report.notes), report.notes
    assert not any(NOT_RUN in note for note in tfk.prove(encoder().train(), padded()).notes)


def test_what_cannot_be_compiled_is_refused(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("no compiler\nand more words")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", lambda model, **_: refuse)
        with pytest.raises(
            RuntimeError, match="^prove: the patched model fails under torch.compile: RuntimeError: no compiler$"
        ):
            tfk.prove(small().eval(), torch.randn(5, 8), compile=True)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", lambda model, **_: model)
        with pytest.raises(RuntimeError, match="torch.compile has compiled nothing"):
            tfk.prove(small().eval(), torch.randn(5, 8), compile=True)
    with pytest.raises(TypeError, match="compile must be True, False or None, got 1"):
        tfk.prove(small(), torch.randn(5, 8), compile=1)


def test_a_stack_that_the_compiler_leaves_alone_runs_packed():
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.head = encoder(), nn.Linear(32, 4)

        @torch.compiler.disable
        def encode(self, **inputs):
            return self.encoder(**inputs)

        def forward(self, **inputs):
            return self.head(self.encode(**inputs)).relu()

    report = tfk.prove(Around().eval(), padded(), compile=True)
    assert report.passed and ("output", "", "output, compiled") in rows(report), report.table()


def test_nothing_is_left_behind():
    """Neither what was proven nor compiled code of a class, of which torch keeps eight a function."""
    alive, real = [], compiled.Form.__init__

    def noted(form, *args):
        alive.append(weakref.ref(form))
        real(form, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled.Form, "__init__", noted)
        for _ in range(5):
            assert tfk.prove(encoder().eval(), padded(), compile=True).passed
    gc.collect()
    assert len(alive) == 5 and not any(form() for form in alive)
    model, graphs = encoder().eval(), []
    tfk.patch(model)
    torch.compile(model, fullgraph=True, backend=lambda graph, inputs: graphs.append(1) or graph.forward)(**padded())
    assert graphs == [1]


def test_a_backward_that_cannot_be_compiled_is_a_note_where_nobody_asked(monkeypatch):
    real = compiled._inductor

    def without_gradients(graphs, graph, inputs):
        if torch.is_grad_enabled():
            raise RuntimeError("no backward")
        return real(graphs, graph, inputs)

    monkeypatch.setattr(compiled, "_inductor", without_gradients)
    report = tfk.prove(torch.compile(small().eval()), torch.randn(5, 8))
    assert report.passed and not rows(report) and any(NOT_RUN in note for note in report.notes), report.notes
    with pytest.raises(
        RuntimeError, match="prove: the patched model fails under torch.compile: RuntimeError: no backward$"
    ):
        tfk.prove(small().eval(), torch.randn(5, 8), compile=True)


@pytest.mark.parametrize("stance", ["force_eager", "default"])
def test_a_model_that_comes_compiled_where_nothing_can_be_has_a_note(stance, monkeypatch):
    model = torch.compile(small().eval())
    if stance == "default":
        monkeypatch.setattr(compiled, "_inductor", lambda *_: 1 / 0)
    with torch.compiler.set_stance(stance):
        report = tfk.prove(model, torch.randn(5, 8))
        assert report.passed and not rows(report)
        assert any(NOT_RUN in note and "torch.compile" in note for note in report.notes), report.notes
        with pytest.raises(RuntimeError, match="prove: .*torch.compile"):
            tfk.prove(model, torch.randn(5, 8), compile=True)


class OfItsForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = small()

    @torch.compile
    def forward(self, x):
        return self.body(x)


def _own_forward():
    model = small()
    model.forward = torch.compile(model.forward)
    return model


@pytest.mark.parametrize("make", [OfItsForward, _own_forward])
def test_a_forward_that_comes_compiled(make):
    report = tfk.prove(make().eval(), torch.randn(5, 8))
    assert report.passed and ("output", "", "output, compiled") in rows(report), report.table()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_wrapper_that_a_function_holds_too(dtype):
    model = small().eval()
    part = torch.compile(model[3])
    model[3], model.run = part, lambda x: part(x)
    around = Calls(model)
    report = tfk.prove(around, torch.randn(5, 8), dtype=dtype)
    assert report.passed and ("output", "", "output, compiled") in rows(report), report.table()
    assert around.model[3] is part and all(parameter.grad is None for parameter in around.parameters())


class Calls(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model.run(self.model[2](self.model[1](self.model[0](x))))


@pytest.mark.parametrize("of", ["forward", "function"])
def test_what_the_user_compiles_is_compiled_after_a_proof(of):
    graphs = []
    own = torch.compile(backend=lambda graph, inputs: graphs.append(1) or graph.forward)
    squared = own(lambda x: x.relu().square())

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def run(self, x):
            return squared(self.linear(x))

        forward = run if of == "function" else own(lambda self, x: self.linear(x).relu())

    model = Model().eval()
    assert tfk.prove(model, torch.randn(5, 8), compile=False).passed and not graphs
    model(torch.randn(5, 8))
    assert graphs == [1]


def test_a_graph_break_counts_for_no_class():
    class Breaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            y = self.linear(x)
            torch._dynamo.graph_break()
            return y.relu()

    kept = set(vars(compiled))
    for _ in range(4):
        assert tfk.prove(Breaks().eval(), torch.randn(5, 8), compile=True).passed
    assert set(vars(compiled)) == kept
    graphs = []
    torch.compile(Breaks().eval(), backend=lambda graph, inputs: graphs.append(1) or graph.forward)(torch.randn(5, 8))
    assert graphs == [1, 1]


def test_what_a_compiler_is_told_to_leave_alone_is_not_compiled():
    model = small().eval()
    model.forward = torch.compiler.disable(model.forward)
    assert not compiled.is_compiled(model)
    model.forward = torch.compile(nn.Sequential.forward)
    assert compiled.is_compiled(model)


@pytest.mark.parametrize("p", [0.5, 1.0])
def test_what_drops_everything_draws_nothing(p):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), nn.Dropout(p), nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3))
    report = tfk.prove(model, torch.randn(4, 6, 8), compile=True)
    assert report.passed and rows(report), report.table()


def test_what_was_compiled_is_forgotten():
    def living():
        gc.collect()
        return sum(issubclass(type(each), torch.fx.GraphModule) for each in gc.get_objects())

    def run():
        form = compiled.Compiled(small(), torch.device("cpu"))
        with form.same_dropout():
            form(torch.randn(4, 8)).sum().backward()

    run()
    before = living()
    run()
    assert living() <= before
