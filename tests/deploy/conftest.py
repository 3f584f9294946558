"""Helm and kubectl for the tests of this folder, fetched once by scripts/fetch_tools.py."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]

Helm = Callable[..., subprocess.CompletedProcess[str]]


def _load_fetcher() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fetch_tools", ROOT / "scripts" / "fetch_tools.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with helm may need a network once, to fetch it."""
    for item in items:
        if Path(__file__).parent in item.path.parents and "helm" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def tools() -> dict[str, Path]:
    fetcher = _load_fetcher()
    try:
        found: dict[str, Path] = fetcher.fetch(say=False)
    except fetcher.ToolsUnavailable as problem:
        pytest.fail(f"helm is missing and could not be fetched: {problem}", pytrace=False)
    return found


@pytest.fixture(scope="session")
def helm(tools: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Run helm with arguments; its home is a temporary folder, and it meets no cluster."""
    home = str(tmp_path_factory.mktemp("helm"))

    def run(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(tools["helm"]), *map(str, arguments)],
            input=stdin,
            env={"HOME": home, "KUBECONFIG": "/dev/null", "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run
