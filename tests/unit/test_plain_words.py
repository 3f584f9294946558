"""Comments and docstrings are plain English: the patterns that readers stumble over stay out."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("controlplane", "workers", "placement", "profiler", "testkit")
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
                flat = " ".join(paragraph.split())
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


@pytest.mark.parametrize(
    ("text", "is_plain"),
    [
        ("The gateway probes latency.", True),
        ("Nobody waits.", False),
        ("Of a whole answer no first token is seen.", False),
        ("Whose it is says its key.", False),
        ("Who owns the model?", True),
        ("As long as it runs, no more than 5 requests wait.", True),
        ("It is this worker's no more.", False),
    ],
)
def test_the_patterns_know_plain_sentences(text: str, is_plain: bool) -> None:
    assert any(re.search(pattern, text) for pattern in PATTERNS.values()) is not is_plain
