"""Every benchmark still runs: its rehearsal, on tiny shapes and a CPU. One without a rehearsal fails here."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import rehearsing

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
# Those that start processes, or take longer than a second or two; and those that want an engine.
SLOW = {
    "compression.quality",
    "compression.speed",
    "compression.train",
    "gateway",
    "gpu_worker",
    "kernels",
    "kernels.compiling",
    "overload",
    "packing",
    "placement_gpu",
    "profiling",
    "reproduction",
    "routing.candidates",
    "routing.caraserve",
    "routing.decisions",
    "routing.herding",
}


def runnable() -> dict[str, ast.Module]:
    """What `python -m benchmarks.NAME` runs, by its name."""
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


def test_all_are_found() -> None:
    known = {"gateway", "kernels", "packing", "placement", "profiling", "serving"}
    assert known <= set(RUNNABLE)
    assert set(REHEARSED) >= SLOW, "a name in SLOW is no benchmark's"


@pytest.mark.parametrize("name", RUNNABLE)
def test_it_has_a_rehearsal(name: str) -> None:
    """Its own, or that of the benchmark it is a part of (`REHEARSED_BY`)."""
    tree = RUNNABLE[name]
    if part_of := constant(tree, "REHEARSED_BY"):
        assert part_of.removeprefix("benchmarks.") in REHEARSED
        return
    assert name in REHEARSED, f"benchmarks.{name} has no rehearse(folder); see benchmarks/README.md"
    assert ast.unparse(tree.body[-1]).endswith("rehearsing.run(main, rehearse)")


def with_marks(names: list[str]) -> Iterator[Any]:
    for name in names:
        yield pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])


def rehearse(name: str, folder: Path, llm: Any = None) -> None:
    package = "__main__" if (FOLDER / name / "__main__.py").exists() else ""
    module = importlib.import_module(".".join(part for part in ("benchmarks", name, package) if part))
    rehearsing.carry_out(module.rehearse, folder, llm)


@pytest.mark.parametrize("name", with_marks([name for name in REHEARSED if name not in WITH_ENGINE]))
def test_it_runs(name: str, tmp_path: Path) -> None:
    rehearse(name, tmp_path)


@pytest.mark.slow
def test_those_that_measure_inside_an_engine_run(tmp_path: Path) -> None:
    """In a process of its own, with one engine for all of them."""
    command = [sys.executable, "-m", "benchmarks.rehearsal_engine", *WITH_ENGINE, "--folder", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    found = subprocess.run(
        command,
        env={**environment, "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-4000:]


def test_from_the_command_line() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks.serving.plot", rehearsing.FLAG],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "rehearsed"


def test_a_rehearsal_marks_what_it_writes_and_keeps_out_of_the_results(tmp_path: Path) -> None:
    rehearsing.write_result(tmp_path / "real.json", {"rows": [1]})
    with pytest.raises(KeyError):
        rehearsing.check(tmp_path / "real.json")
    with rehearsing.rehearsal():
        rehearsing.write_result(tmp_path / "tried.json", {"rows": [1]})
        with pytest.raises(ValueError, match="expected a temporary folder"):
            rehearsing.write_result(rehearsing.RESULTS / "tried.json", {"rows": [1]})
    assert rehearsing.check(tmp_path / "tried.json", "rows")["rows"] == [1]
    assert not rehearsing.is_rehearsal()
