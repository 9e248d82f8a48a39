"""The house rules that a program can check: who imports whom, which files mirror which, and what must not appear."""

import ast
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import tfm_kernels as tfk
from tfm_kernels import _backend, _library

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tfm_kernels"
LEAVES = {"mask", "dropout", "_autocast", "_backend", "_library", "_check", "_measured"}
# room -> the rooms it may import from (besides itself); a file directly in the package is a room of its own
ALLOWED = {
    "mask": set(),
    "dropout": set(),
    "_autocast": set(),
    "_backend": {"_library", "_measured"},
    "_measured": {"_version"},
    "_durable": set(),
    "_version": set(),
    "interleaved": set(),
    "_library": set(),
    "_flops": {"_library"},
    "_transformers": set(),
    "_autograd": {"_library"},
    "_check": {"dropout"},
    "reference": {"mask", "dropout"},
    "aten": {"mask", "dropout", "_autocast"},
    "triton": {"dropout"},  # ops reach it by name alone, through _library, when a kernel is called
    "ops": LEAVES | {"_autograd", "reference", "aten"},
    "nn": LEAVES | {"ops"},
    "models": LEAVES | {"nn", "ops"},
    "generation": LEAVES | {"_transformers", "models", "nn", "ops"},
    "attention_maps": LEAVES | {"nn", "ops"},
    "heat_maps": set(),
    "testing": LEAVES | {"ops", "reference"},
    "patching": LEAVES | {"_transformers", "nn", "ops", "_flops"},
    "proof": LEAVES | {"patching", "nn", "ops", "testing"},
    "quantization": LEAVES | {"patching", "nn"},
    "onnx_export": LEAVES | {"_durable", "proof", "patching", "nn", "ops"},
    "diagnosis": LEAVES | {"ops"},
    "tuning": LEAVES | {"interleaved"},
    "training": LEAVES | {"_durable", "models", "nn", "ops", "patching", "quantization"},
    "bench": LEAVES | {"_version", "testing", "proof", "patching", "interleaved", "nn", "ops"},
    "demo": LEAVES | {"proof", "patching", "diagnosis", "interleaved", "nn", "ops"},
    "commands": LEAVES
    | {
        "training",
        "generation",
        "attention_maps",
        "heat_maps",
        "onnx_export",
        "models",
        "quantization",
        "proof",
        "patching",
        "diagnosis",
        "tuning",
        "bench",
        "nn",
        "ops",
    },
    "cli": {"commands"},
    "__main__": {"cli"},
}
SIBLINGS_APART = ("reference", "aten", "triton")  # files in these folders do not import one another
# but for these
SHARED = re.compile(
    "_(tile|launch|ahead|rows|gemm.*|ffn.*|(layer_norm_)?sums|activation|(linear_)?cross_entropy.*|rotary|attention.*|int8.*)"
)


def modules():
    return sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


def room(path):
    return path.parts[0].removesuffix(".py")


def imported(path):
    """Dotted names inside the package that a file imports, with the function-level ones marked lazy."""
    tree = ast.parse((PACKAGE / path).read_text())
    package = ("tfm_kernels", *path.parts[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            name = (*base, *(node.module.split(".") if node.module else ()))
            if name[:1] == ("tfm_kernels",):
                yield from ((name + (alias.name,))[1:] for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = tuple(alias.name.split("."))
                if parts[0] == "tfm_kernels":
                    yield parts[1:]


@pytest.mark.parametrize("path", modules(), ids=str)
def test_imports_point_down(path):
    here = room(path)
    assert here in ALLOWED, f"tell test_layering.py what {here} may import"
    for name in imported(path):
        there = name[0] if name else "the package root"
        assert there == here or there in ALLOWED[here], f"{path} must not import {'.'.join(name)}"
        if here in SIBLINGS_APART and there == here and not any(SHARED.fullmatch(part) for part in name):
            raise AssertionError(f"{path} must not import its sibling {'.'.join(name)}")


@pytest.mark.parametrize("path", [p for p in modules() if room(p) == "ops"], ids=str)
def test_ops_do_not_import_other_ops(path):
    """Files of one op share its stem: attention.py, attention_varlen.py; the SDPA front is attention's too."""
    stem = op_stem(path.stem)
    for name in imported(path):
        if name[0] == "ops" and len(name) > 1:
            assert op_stem(name[1]) == stem, f"{path} must not import {'.'.join(name)}"


def op_stem(name):
    name = name.removeprefix("_")
    if name == "scaled_dot_product_attention":
        return "attention"
    return max((stem for stem in stems() if name == stem or name.startswith(stem + "_")), key=len, default=name)


def stems():
    """The ops: every contract that declares compiled kernels."""
    return sorted({operator.split("_fwd_")[0] for operator in declared() if "_fwd_" in operator})


def declared():
    return sorted(_library._missing)


def test_every_op_has_its_mirrors():
    assert stems(), "no op declares kernels"
    for stem in stems():
        expected = [
            PACKAGE / "ops" / f"{stem}.py",
            PACKAGE / "reference" / f"{stem}.py",
            PACKAGE / "aten" / f"{stem}.py",
            ROOT / "tests" / "ops" / f"test_{stem}.py",
            PACKAGE / "bench" / "ops" / f"{stem}.py",
        ]
        for operator in (name for name in declared() if op_stem(name) == stem):
            if operator.endswith("_cpu"):
                expected.append(ROOT / "csrc" / "cpu" / f"{operator.removesuffix('_cpu')}.cpp")
            if operator.endswith("_triton"):
                expected.append(PACKAGE / "triton" / f"{operator.removesuffix('_triton')}.py")
                expected.append(ROOT / "tests" / "interpreter" / f"test_{stem}.py")
            if operator.endswith("_cuda"):
                expected.append(ROOT / "csrc" / "cuda" / f"{operator.removesuffix('_cuda')}.cu")
                expected.append(ROOT / "tests" / "simt" / f"test_{stem}.py")
        absent = [str(path.relative_to(ROOT)) for path in expected if not path.exists()]
        assert not absent, f"{stem} lacks {', '.join(absent)}"


def test_every_kernel_file_is_declared():
    for path in (ROOT / "csrc" / "cpu").glob("*_[fb]wd.cpp"):
        assert f"{path.stem}_cpu" in declared(), f"{path.name} has no contract"
    for path in (ROOT / "csrc" / "cuda").glob("*_[fb]wd.cu"):
        assert f"{path.stem}_cuda" in declared(), f"{path.name} has no contract"
    for path in (PACKAGE / "triton").glob("*_[fb]wd.py"):
        assert f"{path.stem}_triton" in declared(), f"{path.name} has no contract"


def test_matrix_of_ops_and_backends():
    """Every op answers for every backend; reference always can; a declared kernel is registered in this build."""
    for op in _backend.OPS.values():
        assert set(op.support) <= set(_backend.BACKENDS) and "reference" in op.support, op.name
    for operator in declared():
        if operator.endswith("_triton") and find_spec("triton") is None:
            assert _library._missing[operator] == "triton is not installed: pip install triton"
            continue
        if operator.endswith("_cuda") and shutil.which("nvcc") is None and _library.cuda_extension is None:
            assert "the CUDA extension was not built" in _library._missing[operator]
            continue
        assert _library._missing[operator] is None, f"{operator}: {_library._missing[operator]}"


def run(code):
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


def test_import_touches_neither_triton_nor_a_device():
    done = run(
        "import sys; sys.modules['triton'] = None\n"
        "import torch, tfm_kernels as tfk\n"
        "assert not torch.cuda.is_initialized()\n"
        "print(tfk.ops.layer_norm(torch.randn(2, 8)).shape)"
    )
    assert done.returncode == 0, done.stderr
    done = run(
        "import sys, torch; before = set(sys.modules)\n"
        "import tfm_kernels\n"
        "new = set(sys.modules) - before\n"
        "assert not new & {'triton', 'torch._dynamo', 'tfm_kernels.bench'}, sorted(new)"  # torch's compiler is slow
    )
    assert done.returncode == 0, done.stderr
    done = run(
        "import sys, torch, tfm_kernels as tfk\n"
        "tfk.ops.add_layer_norm(*torch.randn(2, 2, 8, requires_grad=True))[0].sum().backward()\n"
        "assert not any(name.startswith('tfm_kernels.triton') for name in sys.modules)"  # torch itself may load triton
    )
    assert done.returncode == 0, done.stderr


def test_import_without_the_extensions():
    done = run(
        "import sys; sys.modules['tfm_kernels._C'] = sys.modules['tfm_kernels._cuda'] = None\n"
        "import torch, tfm_kernels as tfk\n"
        "x = torch.randn(2, 8)\n"
        "assert tfk.ops.layer_norm(x).shape == (2, 8)\n"
        "assert '-> aten' in tfk.explain('layer_norm', x)\n"
        "try:\n"
        "    tfk.ops.layer_norm(x, backend='cpu')\n"
        "except tfk.BackendError as error:\n"
        "    print(error)"
    )
    assert done.returncode == 0, done.stderr
    assert "C++ extension was not built" in done.stdout and "pip install" in done.stdout


def test_device_code_knows_no_torch():
    """A kernel takes pointers and sizes; torch is met by the binding alone, through its stable ABI."""
    for path in (ROOT / "csrc" / "cuda").iterdir():
        text = path.read_text()
        kernel_half = text.split("#else  // the binding")[0] if path.suffix == ".cu" else text
        if path.name not in ("binding.h", "module.cpp"):
            assert "torch/" not in kernel_half, f"{path.name} includes torch"
        assert "torch/extension.h" not in text and "ATen/" not in text and "c10/" not in text, path.name
        assert len(text.splitlines()) <= 300, f"{path.name} is too long"


FORBIDDEN = {
    "an environment variable read at run time": re.compile(r"os\.environ|os\.getenv"),
    "a pickle": re.compile(r"\bpickle\.(load|loads)\b|torch\.load\((?![^)]*weights_only=True)"),
    "a device queried at import": re.compile(r"^\S.*torch\.cuda\.(is_available|current_device|get_device)", re.M),
}


@pytest.mark.parametrize("path", modules(), ids=str)
def test_nothing_forbidden(path):
    text = (PACKAGE / path).read_text()
    for what, pattern in FORBIDDEN.items():
        assert not pattern.search(text), f"{path} holds {what}"


def test_no_vague_file_names():
    vague = {"utils", "util", "helper", "helpers", "common", "base", "misc", "v2"}
    for path in [*PACKAGE.rglob("*"), *(ROOT / "csrc").rglob("*"), *(ROOT / "bench").rglob("*")]:
        assert path.stem.lower() not in vague, f"{path.name} does not say what it holds"


def test_public_surface_is_exported():
    for name in ("BackendError", "Mask", "explain", "models", "nn", "ops", "patching", "testing", "use_backend"):
        assert hasattr(tfk, name)
    assert isinstance(torch.ops.tfm_kernels.layer_norm_fwd_cpu.default, torch._ops.OpOverload)
