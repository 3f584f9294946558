"""Documents name what exists: their links, the files and the folders that they speak of."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "benchmarks/**/*.md",
        "deploy/*.md",
        "requirements/*.md",
        "helm/**/*.md",
    )
    for path in ROOT.glob(pattern)
)
CODE = (
    *("controlplane", "workers", "placement", "profiler", "benchmarks", "testkit"),
    *("scripts", "tests", "docs"),
)
PATH = re.compile(rf"`((?:{'|'.join(CODE)})/[\w/.-]*)`")
MODULE = re.compile(rf"\b((?:{'|'.join(CODE[:-3])})(?:\.[a-z_]\w*)+)\b(?![/(:])")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)?(?:#([^)\s]+))?\)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_file_and_folder_that_a_document_names_exists(document: Path) -> None:
    named = PATH.findall((ROOT / document).read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_module_that_a_document_names_exists(document: Path) -> None:
    named = MODULE.findall((ROOT / document).read_text())
    assert [name for name in named if not is_module(name)] == []


def is_module(name: str) -> bool:
    """The module of a name in it, as in `package.module.name`."""
    if name.endswith((".md", ".py", ".json", ".png")):
        return True
    path = ROOT / name.replace(".", "/")
    return any(
        at.is_dir() or at.with_suffix(".py").exists() for at in (path, path.parent) if at.parent != ROOT
    )


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_link_of_a_document_leads_somewhere(document: Path) -> None:
    text = (ROOT / document).read_text()
    assert [f"{to}#{at}" for to, at in LINK.findall(text) if not leads(document, to, at)] == []


def leads(document: Path, to: str, anchor: str) -> bool:
    target = (ROOT / document).parent / to if to else ROOT / document
    return target.exists() and (not anchor or anchor in anchors(target))


def anchors(document: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


CODE_IN_TEXT = re.compile(r"```.*?```|^    [^\n]*$|`[^`]*`|\]\([^)]*\)", re.S | re.M)
# Each has a plainer word: no client, any client, again, next to, N, a noun; see CONTRIBUTING.md.
HARD_TO_READ = re.compile(
    r"\b(nobody|somebody|anybody|whoever|(?<!lace )anew|once more|beside|so many|what who)\b", re.I
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_documents_use_plain_words(document: Path) -> None:
    prose = CODE_IN_TEXT.sub("", (ROOT / document).read_text())
    assert [prose[max(0, m.start() - 30) : m.end() + 30] for m in HARD_TO_READ.finditer(prose)] == []


RESULTS = ROOT / "benchmarks/results"
DATA = re.compile(r"`([\w.]+\.(?:json|jsonl|log))`")


@pytest.mark.parametrize("page", sorted(RESULTS.rglob("*.md")), ids=lambda page: page.stem)
def test_every_file_of_data_that_a_page_of_results_names_exists(page: Path) -> None:
    files = {path.name for path in RESULTS.rglob("*")}
    assert set(DATA.findall(page.read_text())) - files == set()
