"""What a module does to packages that are not ours, read from its source."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

OURS = ("controlplane", "placement", "profiler", "workers")


def replacements(tree: ast.Module) -> set[str]:
    """The parts of packages, and the methods of single objects, that the module replaces: as it writes them.

    A part: an attribute of something that the module imports from a package that is not ours. A method: an
    attribute of any object but `self` that gets a function made in this module.
    """
    imported, functions = imports(tree), _functions(tree)
    found = set()
    for node in ast.walk(tree):
        for target, value in _assigned(node):
            if (root := _root(target)) in imported or (root != "self" and _is_function(value, functions)):
                found.add(ast.unparse(target))
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "setattr"
            and _root(node.args[0]) in imported
        ):
            found.add(ast.unparse(node.args[0]))
    return found


def private_names(tree: ast.Module) -> set[str]:
    """The private names of packages that are not ours, as dotted paths: `ray.serve.api._run`."""
    imported = imports(tree)
    found = {path for path in imported.values() if _is_private(path)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (root := _root(node)) in imported:
            path = ".".join([imported[root], *ast.unparse(node).split(".")[1:]])
            if _is_private(path) and "(" not in path and "[" not in path:
                found.add(path)
    return {path for path in found if not any(other.startswith(f"{path}.") for other in found)}


def imports(tree: ast.Module) -> dict[str, str]:
    """The names that the module imports from packages that are not ours, nor Python's, with dotted paths."""
    found = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    path = alias.name if alias.asname else alias.name.partition(".")[0]
                    found[alias.asname or path] = path
            case ast.ImportFrom(module=str(module), names=names):
                for alias in names:
                    found[alias.asname or alias.name] = f"{module}.{alias.name}"
    others = (*OURS, *sys.stdlib_module_names)
    return {name: path for name, path in found.items() if path.partition(".")[0] not in others}


def modules(root: Path) -> Iterator[Path]:
    """Our modules, without those in folders `patches`."""
    for package in OURS:
        for path in sorted((root / package).rglob("*.py")):
            if "patches" not in path.parts:
                yield path


def _assigned(node: ast.AST) -> Iterator[tuple[ast.Attribute, ast.expr | None]]:
    """The attributes that a statement assigns or deletes, each with its value."""
    pairs: list[tuple[ast.expr, ast.expr | None]]
    match node:
        case ast.Assign(targets=targets, value=value):
            pairs = [pair for target in targets for pair in _unpacked(target, value)]
        case ast.AugAssign() | ast.AnnAssign():
            pairs = [(node.target, node.value)]
        case ast.Delete(targets=targets):
            pairs = [(target, None) for target in targets]
        case _:
            return
    for assigned, given in pairs:
        if isinstance(assigned, ast.Attribute):
            yield assigned, given


def _unpacked(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr | None]]:
    if isinstance(target, ast.Tuple):
        values = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
        return list(zip(target.elts, values, strict=False))
    return [(target, value)]


def _is_function(value: ast.expr | None, functions: set[str]) -> bool:
    match value:
        case ast.Lambda():
            return True
        case ast.Name(id=name):
            return name in functions
        case ast.Call(func=made):
            return ast.unparse(made) in ("partial", "functools.partial")
    return False


def _functions(tree: ast.Module) -> set[str]:
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_private(path: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in path.split("."))
