"""Recognising code by what it says: a fingerprint of a method's syntax tree.

Names of classes tell little (a library may hold eighty copies of one block) and can stay while the code under them
changes. A fingerprint covers the statements of a method and nothing else: no docstring, annotation, decorator, comment
or layout. ``python -m tfm_kernels.patching.source package.module.Class.method`` prints one.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .swap import original_class

_said: dict[Callable[..., Any], str | None] = {}  # function -> its fingerprint
_IGNORED = {"annotation", "returns", "decorator_list", "type_comment", "type_params", "ctx", "kind", "type_ignores"}


def fingerprint(function: Callable[..., Any]) -> str | None:
    """Twelve hexadecimal digits of a method's statements, below its decorators; None where there is no source."""
    if function not in _said:
        _said[function] = _read(inspect.unwrap(function))
    return _said[function]


def _read(function: Callable[..., Any]) -> str | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        return None
    first = definition.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        definition.body = definition.body[1:]
    return hashlib.sha256(_canonical(definition).encode()).hexdigest()[:12]


def _canonical(node: Any) -> str:
    """The tree as text, equal in every Python version that parses it to the same tree."""
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node) if name not in _IGNORED)
        told = (f"{name}={_canonical(value)}" for name, value in fields if value is not None and value != [])
        return f"{type(node).__name__}({','.join(told)})"
    if isinstance(node, list):
        return f"[{','.join(map(_canonical, node))}]"
    return repr(node)


def says(module: Any, method: str, *known: str) -> bool:
    """Whether a module's own class has exactly the known code for ``method``, and is called in the ordinary way.

    Cheap enough for every call. Compiled code, which cannot read sources, knows the functions that were met before.
    """
    cls: Any = original_class(module)
    function = getattr(cls, method, len)
    if function not in _said and torch.compiler.is_compiling():
        return False
    return cls.__call__ is nn.Module.__call__ and fingerprint(function) in known


def main(names: list[str]) -> None:
    """Prints the fingerprint of each ``package.module.Class.method``."""
    for name in names:
        module, owner, method = name.rsplit(".", 2)
        print(name, fingerprint(getattr(getattr(importlib.import_module(module), owner), method)))


if __name__ == "__main__":
    main(sys.argv[1:])
