"""All benchmarks that can be run, and how each is rehearsed."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import rehearsing

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
STARTING_AN_ENGINE = {"fuzzing.bodies", "unequal_variants"}
# Those that start processes, or take longer than a second or two; and those that want an engine.
SLOW = {
    "chosen_sizes",
    "compression.quality",
    "compression.speed",
    "compression.train",
    "fuzzing.folders",
    "fuzzing.requests",
    "gateway",
    "hardening",
    "kernels",
    "kernels.compiling",
    "overload",
    "profiling",
    "routing.caraserve",
    "routing.decisions",
    "serving.simulated",
    "unread_streams",
}


def runnable() -> dict[str, ast.Module]:
    """The rehearsals, by the names that `python -m benchmarks.NAME` runs."""
    found = {}
    for path in sorted(FOLDER.rglob("*.py")):
        tree = ast.parse(path.read_text())
        if any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in tree.body):
            name = ".".join(path.relative_to(FOLDER).with_suffix("").parts)
            found[name.removesuffix(".__main__")] = tree
    return found


RUNNABLE = runnable()


def constant(tree: ast.Module, name: str) -> str:
    """The string that a module assigns to `name`, or nothing."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return str(ast.literal_eval(node.value))
    return ""


def rehearsal_of(tree: ast.Module) -> ast.FunctionDef | None:
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return next((function for function in functions if function.name == "rehearse"), None)


REHEARSED = {name: found for name, tree in RUNNABLE.items() if (found := rehearsal_of(tree))}
WITH_ENGINE = [
    name for name, function in REHEARSED.items() if "llm" in [argument.arg for argument in function.args.args]
]


def with_marks(names: Iterable[str]) -> Iterator[Any]:
    for name in sorted(names):
        yield pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])


def rehearse(name: str, folder: Path, llm: Any = None) -> None:
    package = "__main__" if (FOLDER / name / "__main__.py").exists() else ""
    module = importlib.import_module(".".join(part for part in ("benchmarks", name, package) if part))
    rehearsing.carry_out(module.rehearse, folder, llm)
