"""Documents name what the code has: settings, options of commands, calls of the API, metrics."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry
from typer.core import TyperCommand

from controlplane import __version__
from controlplane.api.access import NEEDED, OPEN_PATHS
from controlplane.cli.lazy_commands import LazyCommand
from controlplane.cli.main import COMMANDS
from controlplane.controller.metrics import ControllerMetrics
from controlplane.gateway.metrics import Metrics
from controlplane.gateway.queue_metrics import QueueMetrics
from controlplane.runtime.start_checks import OTHERS, setting_names
from scripts import settings_page
from testkit.engine_configs import echo_config
from workers.engine.variant_metrics import READ_SECONDS, VariantCollector
from workers.messages import EngineResidency

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for pattern in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/**/*.md", "deploy/*.md")
    for path in ROOT.glob(pattern)
)
VARIABLE = re.compile(r"OSTINATO_[A-Z0-9_]*[A-Z0-9]")
SPAN = re.compile(r"`([^`\n]+)`")
BLOCK = re.compile(r"^(?:    |\s*- )?(ostinato .+)$", re.M)
CALL = re.compile(r"\b(GET|POST|PUT|PATCH|DELETE) (/[\w./{}-]*)")
METRIC = re.compile(r"`(ostinato_\w+)`")
OF_ALL = {"--json", "--url", "--debug", "--help"}
MAX_WORDS = {"README.md": 600, "ARCHITECTURE.md": 2000, "docs": 24_000}  # docs/settings.md is generated


def test_the_page_of_settings_is_made_from_the_code() -> None:
    written = settings_page.PAGE.read_text(encoding="utf-8")
    assert written == settings_page.page(), "run: python scripts/settings_page.py"


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_variable_that_a_document_names_is_a_setting(document: Path) -> None:
    named = set(VARIABLE.findall((ROOT / document).read_text()))
    assert named - setting_names() - OTHERS == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_option_that_a_document_names_is_its_commands(document: Path) -> None:
    wrong = [
        f"{name} {option}"
        for name, options in commands((ROOT / document).read_text())
        for option in options - OF_ALL - known_options(name)
    ]
    assert wrong == []


def test_the_page_of_commands_names_all_of_them() -> None:
    named = {said.split()[0] for said in SPAN.findall((ROOT / "docs/cli.md").read_text())}
    assert {str(command.name) for command in COMMANDS} - named == set()


def commands(text: str) -> Iterator[tuple[str, set[str]]]:
    """Each command of `ostinato` in code of a document, with the options that follow it."""
    names = {command.name for command in COMMANDS}
    for said in (*SPAN.findall(text), *BLOCK.findall(text)):
        words = said.replace("\\|", " ").split("#")[0].replace("[", " ").replace("]", " ").split()
        words = words[words[0] == "ostinato" :] if words else []
        if words and words[0] in names:
            yield words[0], {re.split("[=,;)]", word)[0] for word in words if word.startswith("--")}


def known_options(name: str) -> set[str]:
    [command] = [each for each in COMMANDS if each.name == name]
    assert isinstance(command, LazyCommand)
    loaded: TyperCommand = command.load()
    return {option for each in loaded.params for option in (*each.opts, *each.secondary_opts)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_call_that_a_document_names_is_the_apis(document: Path) -> None:
    known = {(method, plain(path)) for method, path in NEEDED} | {("GET", path) for path in OPEN_PATHS}
    named = {(method, plain(path)) for method, path in CALL.findall((ROOT / document).read_text())}
    assert named - known == set()


def plain(path: str) -> str:
    """All names in braces become one name."""
    return re.sub(r"\{[^}]*\}", "{}", path).rstrip(".")


def test_the_page_of_metrics_names_all_of_them() -> None:
    gateway, controller, engine = (CollectorRegistry() for _ in range(3))
    Metrics(gateway)
    gateway.register(QueueMetrics(lambda: {}))
    ControllerMetrics(controller)
    seen = EngineResidency(slots=1, limit=1, skips=0, preemptions=0, blocked=0, variants=())
    engine.register(VariantCollector(lambda: seen, echo_config()))
    families = [f for each in (gateway, controller, engine) for f in each.collect()]
    exposed = {f.name + ("_total" if f.type == "counter" else "") for f in families}
    exposed |= {f.name for f in READ_SECONDS.collect()}
    assert set(METRIC.findall((ROOT / "docs/monitoring.md").read_text())) == exposed


def test_every_place_has_the_same_version() -> None:
    chart = yaml.safe_load((ROOT / "helm/ostinato/Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    released = re.findall(r"^## (\d+\.\d+\.\d+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    images = re.findall(r"ostinato:([\d.]+)-", (ROOT / "docs/deploying.md").read_text())
    assert {chart["version"], chart["appVersion"], project["version"], released[0], *images} == {__version__}


def test_documents_stay_short() -> None:
    def words(*paths: Path) -> int:
        return sum(len(path.read_text(encoding="utf-8").split()) for path in paths)

    counted = {
        "README.md": words(ROOT / "README.md"),
        "ARCHITECTURE.md": words(ROOT / "ARCHITECTURE.md"),
        "docs": words(*(p for p in (ROOT / "docs").rglob("*.md") if p != settings_page.PAGE)),
    }
    assert {name: count for name, count in counted.items() if count > MAX_WORDS[name]} == {}
