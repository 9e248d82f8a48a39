"""export_onnx: the file is the model at every size, and only such a file takes the name; the model stays as it is."""

import copy
import math
import resource
import subprocess
import sys

import onnx
import onnxruntime  # the file's own check needs it too: where it is missing these tests fail
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfm_kernels as tfk
from tests.models.peers import KINDS, inputs, small
from tests.patching import models
from tfm_kernels import onnx_export, patching
from tfm_kernels.onnx_export import attention, integers, tensorrt
from tfm_kernels.onnx_export import file as files
from tfm_kernels.proof.rule import Judge

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
PATTERNS = [[1, 1, 1, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 0, 1, 0], [1] * 8, [0] * 7 + [1], [0] * 8]


def run(path, **arguments):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return [torch.from_numpy(y) for y in session.run(None, {name: x.numpy() for name, x in arguments.items()})]


def assert_is(path, model, **arguments):
    """The file's outputs are no further from float64 than those of the model by PyTorch's operators."""
    found = run(path, **arguments)
    with torch.no_grad(), tfk.use_backend("aten"):
        own = model(**arguments)
    with torch.no_grad(), tfk.use_backend("reference"):
        double = {name: x.double() if x.is_floating_point() else x for name, x in arguments.items()}
        exact = copy.deepcopy(model).double()(**double)
    named = [
        {str(i): y for i, y in enumerate(each if isinstance(each, (tuple, list)) else (each,))}
        for each in (exact, own, found)
    ]
    rows = Judge(torch.float32, 1.05).compare("output", *named, module="")
    assert len(rows) == len(found) and all(row.passed for row in rows), [str(row) for row in rows]


def operators(path):
    return {(node.domain, node.op_type) for node in onnx.load(path).graph.node}


@pytest.mark.parametrize(
    "kind, norm_first",
    [
        pytest.param(kind, first, marks=() if first == (kind in ("translation", "masked")) else pytest.mark.slow)
        for kind in KINDS
        for first in (False, True)
    ],
)
def test_every_model_with_padding_anywhere_at_every_size(kind, norm_first, tmp_path):
    """The examples are padded on the right; the file must also know other sizes and padding in front and between."""
    positions = "learned" if norm_first else "sinusoidal"
    model = small(kind, layers=1, norm_first=norm_first, backend=None, positions=positions)
    example = inputs(kind)
    report = tfk.export_onnx(model, tmp_path / "model.onnx", tuple(example))
    names = ["source_ids", "target_ids"] if kind == "translation" else ["ids"]
    assert [port.name for port in report.inputs] == names
    assert report.inputs[0].shape == ("batch", "sequence") and report.outputs[0].shape[0] == "batch"
    keep = torch.tensor(PATTERNS, dtype=torch.long)
    padded = (torch.arange(keep.numel()).view(keep.shape) % 17 + 1) * keep
    assert_is(report.path, model, **dict(zip(names, (padded, padded[:, 1:]), strict=False)))
    assert {domain for domain, _ in operators(report.path)} == {""}
    assert not report.remarks and {name for _, name in operators(report.path)} == set(report.operators)
    assert len(report.sizes) >= 3 and report.worst.passed and report.runtime.startswith("onnxruntime ")


def test_a_patched_model_is_exported_by_its_own_code_and_stays_as_it_is(tmp_path):
    model = models.bert()
    ids, mask = models.batch()
    stock = copy.deepcopy(model)
    seen = []
    model.encoder.layer[0].register_forward_pre_hook(lambda module, args: seen.append(type(module)))
    model.train()
    model.pooler.eval()
    tfk.patch(model, backend="cpu")
    before = state(model)
    report = tfk.export_onnx(model, tmp_path / "model.onnx", {"input_ids": ids, "attention_mask": mask})
    assert state(model) == before and patching.settings(model)[0]["backend"] == "cpu" and seen
    assert [port.name for port in report.outputs] == ["last_hidden_state", "pooler_output"]
    named = {"input_ids": ids.repeat(2, 2), "attention_mask": mask.repeat(2, 2)}
    assert_is(report.path, Tuple(stock), **named)
    with pytest.raises(RuntimeError, match="cannot run example_inputs"):
        tfk.export_onnx(model, tmp_path / "model.onnx", {"input_ids": ids.float()})
    assert state(model) == before


@pytest.mark.parametrize("scheme", ["int8_weight_only", "int8_dynamic"])
def test_a_quantized_model(scheme, tmp_path):
    """Dynamic layers keep their integers; the weights of others are written as the floats that they stand for."""
    model = small("causal", layers=1, backend=None)
    tfk.quantize(model, scheme)
    report = tfk.export_onnx(model, tmp_path / "model.onnx", tuple(inputs("causal")))
    assert report.worst.passed and report.runtime.startswith("onnxruntime ")
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, tfk.nn.Int8Linear))
    stored = [t for t in onnx.load(report.path).graph.initializer if t.data_type == onnx.TensorProto.INT8]
    assert sum(math.prod(t.dims) for t in stored) == (weights if scheme == "int8_dynamic" else 0)
    assert ("MatMulInteger" in report.operators) is (scheme == "int8_dynamic")
    ids = torch.arange(1, 16).view(3, 5)
    (found,) = run(report.path, ids=ids)
    with torch.no_grad():
        own = model(ids)
    assert (found - own).norm() < 2e-3 * own.norm()  # an integer more or less here and there


def test_the_check_finds_products_of_integers_that_are_shifted(tmp_path, monkeypatch):
    import onnxscript

    op = onnxscript.opset18
    zero = onnx.helper.make_tensor("zero", onnx.TensorProto.INT8, [], [3])
    shifted = lambda rows, columns: op.MatMulInteger(rows, columns, op.Constant(value=zero))
    monkeypatch.setattr(integers, "_product", shifted)
    model = small("causal", layers=1, backend=None)
    tfk.quantize(model, "int8_dynamic")
    with pytest.raises(RuntimeError, match="does not give the model's outputs"):
        tfk.export_onnx(model, tmp_path / "model.onnx", tuple(inputs("causal")))
    assert not (tmp_path / "model.onnx").exists()


class Tuple(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **named):
        return tuple(self.model(**named).values())


def state(model):
    """All that an export could leave behind."""
    tensors = {name: (t.data_ptr(), t._version, t.dtype) for name, t in model.state_dict(keep_vars=True).items()}
    modules = {
        name: (type(m), m.training, len(m._forward_hooks), len(m._forward_pre_hooks), sorted(m.__dict__))
        for name, m in model.named_modules()
    }
    switches = tfk._backend.forced(), torch.backends.mha.get_fastpath_enabled(), torch.is_grad_enabled()
    return tensors, modules, switches


def test_torch_nn_with_masks_that_are_looked_at(tmp_path):
    """torch.nn's stack looks into a mask for whether it is causal, which no graph can."""
    model = models.encoder().train()
    x = torch.randn(3, 6, 16)
    ignored = torch.arange(6) >= torch.tensor([4, 6, 2])[:, None]
    example = {"src": x, "mask": torch.ones(6, 6).triu(1).bool(), "src_key_padding_mask": ignored}
    report = tfk.export_onnx(model, tmp_path / "model.onnx", example)
    assert model.training and not report.remarks
    assert [port.shape for port in report.inputs] == [("src_0", "src_1", 16), ("src_1", "src_1"), ("src_0", "src_1")]
    window = torch.ones(9, 9).tril(2).triu(-2).logical_not()
    assert_is(
        report.path, model.eval(), src=torch.randn(2, 9, 16), mask=window, src_key_padding_mask=torch.zeros(2, 9).bool()
    )


class Attentions(nn.Module):
    """Every form of scaled_dot_product_attention; rows 2 and 3 of the masks see nothing and little."""

    def forward(self, q, k, v, keep, bias):
        grouped = F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], is_causal=True, enable_gqa=True)
        shown = F.scaled_dot_product_attention(q, k, v, keep)
        added = F.scaled_dot_product_attention(q, k, v, bias, scale=0.7)
        flat = F.scaled_dot_product_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))
        return grouped, shown, added, flat


def attention_inputs(batch, queries, keys):
    torch.manual_seed(batch)
    q, k, v = torch.randn(batch, 4, queries, 8), torch.randn(batch, 4, keys, 8), torch.randn(batch, 4, keys, 3)
    keep = torch.rand(batch, 1, queries, keys) > 0.4
    keep[:, :, 2] = False
    bias = torch.randn(batch, 1, queries, keys).masked_fill(~keep, -math.inf)
    return {"q": q, "k": k, "v": v, "keep": keep, "bias": bias}


def test_attention_means_what_it_means_in_pytorch(tmp_path):
    axes = {name: {0: "batch", 2: "keys"} for name in ("k", "v")}
    axes |= {name: {0: "batch", 2: "queries", 3: "keys"} for name in ("keep", "bias")} | {
        "q": {0: "batch", 2: "queries"}
    }
    example = attention_inputs(2, 5, 7)
    report = tfk.export_onnx(Attentions(), tmp_path / "model.onnx", example, dynamic_axes=axes)
    assert report.inputs[3].shape == ("batch", 1, "queries", "keys") and not report.remarks
    for sizes in ((1, 7, 4), (3, 3, 9)):
        arguments = attention_inputs(*sizes)
        assert_is(report.path, Attentions(), **arguments)
        assert not run(report.path, **arguments)[1][:, :, 2].any()


def test_the_check_finds_attention_that_shows_what_is_hidden(tmp_path, monkeypatch):
    """torch's own translation: a row that sees nothing gets the mean of the hidden values."""
    monkeypatch.setattr(attention, "translations", dict)
    with pytest.raises(RuntimeError, match="does not give the model's outputs: output.1 at .* PyTorch's own"):
        tfk.export_onnx(Masked(), tmp_path / "model.onnx", attention_inputs(2, 5, 7))
    assert not list(tmp_path.iterdir())


class Masked(nn.Module):
    def forward(self, q, k, v, keep, bias):
        return q + bias.isnan().any(), F.scaled_dot_product_attention(q, k, v, keep)


class Counts(nn.Module):
    def forward(self, ids, large):
        return (ids != 0).cumsum(1) - 1, (ids != 0).int().cumsum(1, dtype=torch.int32), large.cumsum(0)


def test_running_counts_are_floats_inside_and_sums_of_integers_are_not(tmp_path):
    ids, large = torch.randint(0, 2, (3, 6)), torch.tensor([2**40 + 1, 3, -7, 2**33])
    report = tfk.export_onnx(Counts(), tmp_path / "model.onnx", (ids, large))
    assert report.remarks == ("CumSum of INT64 is not documented",)  # of the last, which float32 could not hold
    wide = torch.randint(0, 2, (5, 300))
    found = run(report.path, ids=wide, large=large)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, Counts()(wide, large), strict=True))


class Baked(nn.Module):
    """Right at the examples' length, and wrong at others: the number of positions became a constant."""

    def forward(self, x):
        return x * torch.tensor(float(len(x.detach().numpy()) if type(x) is torch.Tensor else 3.0))


def test_the_check_finds_what_is_right_at_one_size_alone(tmp_path):
    with pytest.raises(RuntimeError, match=r"does not give the model's outputs: output at x \((4|2|1), "):
        tfk.export_onnx(Baked(), tmp_path / "model.onnx", torch.randn(3, 5))


class Four(nn.Module):
    """Takes four rows, which a trace does not notice."""

    def forward(self, x):
        if not torch.compiler.is_compiling() and len(x) != 4:
            raise ValueError("not so many")
        return x + 1


def test_a_file_that_ran_at_one_size_alone_says_so(tmp_path):
    report = tfk.export_onnx(Four(), tmp_path / "model.onnx", torch.randn(4, 3))
    assert report.sizes == (((4, 3),),) and report.inputs[0].shape == ("x_0", "x_1")
    assert report.notes[-1] == "axes may vary, but it was run at the sizes of the examples alone"
    assert all("where PyTorch fails itself (ValueError: not so many)" in note for note in report.notes[:-1])
    assert len(report.notes) == 4 and all(note in str(report) for note in report.notes)


class Twice(nn.Module):
    def forward(self, x, y):
        return x + y.repeat(2, 1)


def test_an_axis_that_is_twice_another(tmp_path):
    report = tfk.export_onnx(Twice(), tmp_path / "model.onnx", (torch.randn(6, 4), torch.randn(3, 4)))
    assert report.inputs[0].shape == ("2*y_0", "x_1") and len(report.sizes) == 4
    for rows in (1, 2, 5):
        assert_is(report.path, Twice(), x=torch.randn(2 * rows, 4), y=torch.randn(rows, 4))


@pytest.fixture
def linear():
    torch.manual_seed(0)
    return nn.Linear(8, 4)


def test_an_older_file_stays_where_the_new_one_fails(tmp_path, linear, monkeypatch):
    path = tmp_path / "model.onnx"
    tfk.export_onnx(linear, path, torch.randn(2, 8))
    before = path.read_bytes()

    def spoilt(graph):
        weight = next(iter(graph.graph.initializers.values()))
        weight.const_value = type(weight.const_value)(weight.const_value.raw * 1.00001)

    monkeypatch.setattr(tensorrt, "count_in_float", spoilt)
    with pytest.raises(RuntimeError, match="does not give the model's outputs"):
        tfk.export_onnx(linear, path, torch.randn(2, 8))
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_is_an_os_error_that_names_the_file(tmp_path, linear):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"older")
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, allowed[1]))
    try:
        with pytest.raises(OSError) as told:
            tfk.export_onnx(nn.Linear(200, 200), path, torch.randn(2, 200))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
    assert told.value.filename == str(path) and path.read_bytes() == b"older" and list(tmp_path.iterdir()) == [path]
    for wrong in (tmp_path, tmp_path / "absent" / "model.onnx", path / "model.onnx"):
        with pytest.raises(OSError) as told:
            tfk.export_onnx(linear, wrong, torch.randn(2, 8))
        assert told.value.filename == str(wrong) and told.value.strerror
    assert list(tmp_path.iterdir()) == [path]


def test_more_weights_than_one_file_holds(tmp_path, linear, monkeypatch):
    monkeypatch.setattr(files, "LARGEST", 0)
    path = tmp_path / "model.onnx"
    path.write_bytes(b"older")
    tfk.export_onnx(linear, path, torch.randn(2, 8))
    assert len(list(tmp_path.iterdir())) == 2 and path.read_bytes() != b"older"
    assert_is(path, linear, input=torch.randn(5, 8))
    assert {weight.name for weight in onnx.load(path).graph.initializer} >= {"bias"}  # the model's own names


def test_nothing_of_this_machine_is_in_the_file(tmp_path, linear):
    tfk.export_onnx(linear, tmp_path / "model.onnx", torch.randn(2, 8))
    assert b"site-packages" not in (tmp_path / "model.onnx").read_bytes()
    assert b".py" not in (tmp_path / "model.onnx").read_bytes()


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        (None, ("batch", "sequence")),
        ({}, (1, 6)),
        ({"ids": {0: "N"}}, ("N", 6)),
        ({"ids": {1: "T"}}, (1, "T")),
    ],
    ids=str,
)
def test_axes_that_vary(tmp_path, axes, shape):
    """From a batch of one."""
    model = nn.Embedding(9, 4)
    named = nn.Module()
    named.model, named.forward = model, lambda ids: model(ids)
    report = tfk.export_onnx(named, tmp_path / "model.onnx", torch.randint(1, 9, (1, 6)), dynamic_axes=axes)
    assert report.inputs[0].shape == shape and report.outputs[0].shape == (*shape, 4)
    assert report.sizes[0] == ((1, 6),) and (len(report.sizes) == 1) == (axes == {})
    for size in report.sizes:
        ids = torch.randint(1, 9, size[0])
        assert torch.equal(run(report.path, ids=ids)[0], model(ids))


def test_without_a_runtime_the_report_says_that_nothing_ran(tmp_path, linear, monkeypatch):
    without(monkeypatch, "onnxruntime")
    report = tfk.export_onnx(linear, tmp_path / "model.onnx", torch.randn(2, 8))
    assert report.runtime is None and report.worst is None and "onnxruntime is not installed" in str(report)
    assert_is(report.path, linear, input=torch.randn(5, 8))


def without(monkeypatch, *names):
    for module in (onnx_export, sys.modules["tfm_kernels.onnx_export.check"]):
        monkeypatch.setattr(module, "find_spec", lambda name: None if name in names else object())


def test_importing_the_package_loads_nothing_of_this():
    code = "import sys, tfm_kernels; print([name for name in ('onnx', 'onnx_ir', 'sympy') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_missing_packages_are_one_sentence_that_names_the_extra(tmp_path, linear, monkeypatch):
    without(monkeypatch, "onnx", "onnxscript")
    with pytest.raises(ImportError, match=r"needs onnx and onnxscript, .* pip install 'tfm_kernels\[export\]'"):
        tfk.export_onnx(linear, tmp_path / "model.onnx", torch.randn(2, 8))


class Looks(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x


class Silent(nn.Module):
    def forward(self, x):
        return None


class Same(nn.Module):
    def forward(self, x, y):
        return x + y


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"model": "x"}, TypeError, "model must be a torch.nn.Module, got str"),
        ({"path": 3}, TypeError, "path must be a str or a path, got int"),
        ({"example_inputs": 3}, TypeError, "inputs must be a tensor, a tuple or a dict of arguments, got int"),
        ({"example_inputs": ()}, ValueError, "must hold at least one tensor, got none"),
        ({"example_inputs": torch.randn(2, 3)}, RuntimeError, "Linear cannot run example_inputs (RuntimeError: "),
        ({"opset": 17}, ValueError, "opset must be an integer from 18 to 23, got 17"),
        ({"opset": True}, ValueError, "opset must be an integer from 18 to 23, got True"),
        ({"model": nn.Linear(8, 4).bfloat16()}, ValueError, "must be float32 or float64, got bfloat16: export model."),
        ({"model": Looks()}, RuntimeError, "Looks cannot be captured by torch.export (its code asks"),
        ({"model": Silent()}, ValueError, "Silent gives no tensor"),
        ({"dynamic_axes": ["input"]}, TypeError, "dynamic_axes must be None or a dict such as"),
        ({"dynamic_axes": {"input": ["batch"]}}, TypeError, "dynamic_axes must be None or a dict such as"),
        ({"dynamic_axes": {"x": {0: "batch"}}}, ValueError, "dynamic_axes must name inputs (input), got 'x'"),
        ({"dynamic_axes": {"input": {2: "batch"}}}, ValueError, "axes of input, which has shape (2, 8), got 2"),
        ({"dynamic_axes": {"input": {1: "E"}}}, ValueError, "axis 1 of input, which this model's code fixes at 8"),
        (
            {"model": Same(), "example_inputs": [torch.ones(2, 3)] * 2, "dynamic_axes": {"x": {0: "a"}, "y": {0: "b"}}},
            ValueError,
            "axis 0 of y always has the size of 'a' in this model",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_wrong_is_one_sentence(tmp_path, linear, change, error, sentence):
    call = {"model": linear, "path": tmp_path / "model.onnx", "example_inputs": torch.randn(2, 8)} | change
    with pytest.raises(error) as told:
        tfk.export_onnx(**call)
    assert str(told.value).startswith("export_onnx: ") and sentence in str(told.value)
    assert "\n" not in str(told.value) and not list(tmp_path.iterdir())


def test_the_report_prints_what_is_to_be_known(tmp_path, linear):
    report = tfk.export_onnx(linear, tmp_path / "model.onnx", torch.randn(2, 8), opset=18)
    text = str(report)
    assert "input   input float32 (input_0, 8)" in text and "output  output float32 (input_0, 4)" in text
    assert f"onnxruntime {onnxruntime.__version__}" in text and "times PyTorch's own" in text and "(1, 8)" in text
    assert "TensorRT, by its parser's list, not run: every operator and type in it is documented" in text
    assert report.opset == 18 == onnx.load(report.path).opset_import[0].version
    with pytest.raises(AttributeError):
        report.opset = 20


def test_other_types_of_result_are_left_out_and_told(tmp_path):
    hf = models.transformers()
    config = hf.GPT2Config(vocab_size=99, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    model = hf.GPT2LMHeadModel(config).eval()
    ids, mask = models.batch()
    mask[1] = torch.tensor([0, 0, 1, 1, 1, 1, 1])  # queries that see no key
    report = tfk.export_onnx(model, tmp_path / "model.onnx", {"input_ids": ids, "attention_mask": mask})
    assert [port.name for port in report.outputs] == ["logits"] and "DynamicCache" in report.notes[0]
    grown = ids
    for _ in range(3):  # as the docstring says
        scores = run(report.path, input_ids=grown, attention_mask=torch.ones_like(grown))[0]
        grown = torch.cat([grown, scores[:, -1].argmax(-1, keepdim=True)], 1)
    expected = tfk.generate(model, ids, 3)
    assert torch.equal(grown[:, -3:], expected[:, -3:])
