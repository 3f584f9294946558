"""Comments, docstrings and test names are plain English: the patterns that readers stumble over stay out."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "controlplane",
    "workers",
    "placement",
    "profiler",
    "testkit",
    "tests",
    "benchmarks",
    "scripts",
)
PATTERNS = {
    "a noun in place of nobody, somebody, anybody, whoever": r"(?i)\b(nobody|somebody|anybody|whoever)\b",
    "again": r"\banew\b",
    "a number or a bound (N requests, for 5 s)": r"(?i)\b(so many|so long)\b(?! as)",
    "next to, at the same time as, in addition to": r"(?i)\bbesides?\b",
    "who owns it, as a sentence": r"(?i)\bwhose it is\b",
    "no longer": r"(?i)\bno more\b(?! than)",
    "subject first, not `Of ...`": r"(?:^|[.:] )Of (?!course)",
    "subject first, not `Whose ...` or `Who ...`": r"(?:^|[.] )(?:Whose|Who) (?![^.]*\?)",
}

CODE = re.compile(r"`[^`]*`|--[a-z-]+")  # names in prose are no words
# Words that a test's name avoids, and the openings that make it no sentence with a subject.
TEST_NAME = re.compile(
    r"_(nobody|somebody|anybody|whoever|anew|besides?|whom|so_many|no_more(?!_than))(_|$)"
    r"|^test_(what|who|whose|whoever|of|but|nor|also)_"
)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The file's comments and docstrings, each with the line that it begins in."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if (text := ast.get_docstring(node)) is not None:
            yield node.body[0].lineno, text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def found(package: str) -> list[str]:
    hits = []
    for path in sorted((ROOT / package).rglob("*.py")):
        for line, text in texts(path):
            for paragraph in re.split(r"\n\s*\n|\n- ", text):
                flat = CODE.sub("``", " ".join(paragraph.split()))
                hits += [
                    f"{path.relative_to(ROOT)}:{line}: say {better}: "
                    f"{flat[max(0, hit.start() - 30) : hit.end() + 30]!r}"
                    for better, pattern in PATTERNS.items()
                    for hit in re.finditer(pattern, flat)
                ]
    return hits


@pytest.mark.parametrize("package", PACKAGES)
def test_comments_and_docstrings_are_plain(package: str) -> None:
    assert not (hits := found(package)), "\n".join(hits)


def test_names_of_tests_are_sentences_with_a_subject() -> None:
    names = (
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and TEST_NAME.search(node.name)
    )
    assert not (hits := list(names)), "\n".join(hits)


@pytest.mark.parametrize(
    ("name", "is_plain"),
    [
        ("test_a_burst_refuses_no_request", True),
        ("test_a_variant_loses_no_more_than_its_base", True),
        ("test_nobody_starves", False),
        ("test_what_is_wrong_is_said", False),
        ("test_a_group_is_placed_anew", False),
    ],
)
def test_the_pattern_knows_plain_names(name: str, is_plain: bool) -> None:
    assert (TEST_NAME.search(name) is None) is is_plain


@pytest.mark.parametrize(
    ("text", "is_plain"),
    [
        ("The gateway probes latency.", True),
        ("Nobody waits.", False),
        ("Of a whole answer no first token is seen.", False),
        ("Whose it is says its key.", False),
        ("Who owns the model?", True),
        ("Send `beside` requests with --beside.", True),
        ("As long as it runs, no more than 5 requests wait.", True),
        ("It is this worker's no more.", False),
    ],
)
def test_the_patterns_know_plain_sentences(text: str, is_plain: bool) -> None:
    assert any(re.search(pattern, CODE.sub("``", text)) for pattern in PATTERNS.values()) is not is_plain
