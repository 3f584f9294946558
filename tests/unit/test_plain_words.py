"""Comments, docstrings, messages and names of tests are plain English, without patterns that stop readers."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("controlplane", "workers", "placement", "profiler")
PACKAGES = (*PRODUCT, "testkit", "tests", "benchmarks", "scripts")
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
# Messages are what errors, logs, commands and descriptions of fields say.
MESSAGE_PATTERNS = {
    **PATTERNS,
    "no longer (messages)": r"(?i)\bany ?more\b",
    "continue": r"(?i)\b(go|goes|gone) on\b",
    "correct, change": r"(?i)\bmend(ed|s)?\b",
    "what failed, in place of in vain": r"(?i)\bin vain\b",
    "`is not a`": r"(?<!there )\b(?:is|are) no (?!longer\b)[a-z]",
    "because": r", for (?:it|its|the|there|no|this|that|they|these) ",
    "a noun in place of one": r"\b(?:the|this|that|another|each|such|which) one\b(?! of)|\bones\b"
    r"|\bone (?:that|which|of its own|of the two)\b",
    "a noun in place of those": r"\bthose (?:that|which|who|in)\b",
    "what to do, in place of a question": r"\bis it\b[^.?]*\?",
    "requested": r"\basked for\b",
    "Ostinato's": r"\bours\b",
}
LONGEST_SENTENCE = 25  # words between two of . ; : ( )
# Texts for a model or a kernel's compiler, and facts about files.
ALLOWED = (
    "that somebody wrote down:",
    "Somebody wrote down a long list",
    "a head has no more features",
)

CODE = re.compile(r"`[^`]*`|--[a-z-]+")  # names in prose are no words
# Words that a test's name avoids, and the openings that make it no sentence with a subject.
TEST_NAME = re.compile(
    r"_(nobody|somebody|anybody|whoever|anew|besides?|whom|so_many|no_more(?!_than))(_|$)"
    r"|^test_(what|who|whose|whoever|of|but|nor|also)_"
)


def comments(source: str) -> Iterator[tuple[int, str]]:
    """The comments and docstrings (also of attributes), each with the line that it begins in."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and (text := _literal(node.value)):
            yield node.lineno, inspect.cleandoc(text)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def messages(source: str) -> Iterator[tuple[int, str]]:
    """The string literals of three words or more, with `{}` for each replacement field; no docstrings."""
    tree = ast.parse(source)
    others = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            others |= {id(part) for part in ast.walk(node) if isinstance(part, ast.Constant)} - _nested(node)
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and id(node) not in others and (text := _literal(node)).count(" ") > 1:
            yield node.lineno, text


def _nested(node: ast.JoinedStr) -> set[int]:
    """The literals in the node's replacement fields, which are messages of their own."""
    fields = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
    return {id(part) for field in fields for part in ast.walk(field) if isinstance(part, ast.Constant)}


def _literal(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_literal(part) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def paragraphs(text: str) -> list[str]:
    return [CODE.sub("``", " ".join(paragraph.split())) for paragraph in re.split(r"\n\s*\n|\n- ", text)]


def faults(text: str, patterns: Mapping[str, str]) -> Iterator[str]:
    for flat in paragraphs(text):
        for better, pattern in patterns.items():
            for hit in re.finditer(pattern, flat):
                yield f"say {better}: {flat[max(0, hit.start() - 30) : hit.end() + 30]!r}"


def long_sentences(text: str) -> Iterator[str]:
    """The parts of a message that have too many words. Programs and SQL have no sentences."""
    for sentence in re.split(r"[.;:!?](?:\s|$)|[()\n]", text):
        words = [word for word in sentence.split() if re.search(r"\w|\{", word)]
        if len(words) > LONGEST_SENTENCE and "SELECT" not in text:
            yield f"say it in shorter sentences ({len(words)} words): {sentence.strip()!r}"


def found(package: str, told: Iterable[tuple[str, int, str]]) -> list[str]:
    return [f"{package}/{where}:{line}: {fault}" for where, line, fault in told]


def sources(package: str) -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        yield str(path.relative_to(ROOT / package)), path.read_text()


@pytest.mark.parametrize("package", PACKAGES)
def test_comments_and_docstrings_are_plain(package: str) -> None:
    hits = [
        (where, line, fault)
        for where, source in sources(package)
        for line, text in comments(source)
        for fault in faults(text, PATTERNS)
    ]
    assert not hits, "\n".join(found(package, hits))


@pytest.mark.parametrize("package", PRODUCT)
def test_messages_are_plain(package: str) -> None:
    hits = [
        (where, line, fault)
        for where, source in sources(package)
        for line, text in messages(source)
        if not any(allowed in text for allowed in ALLOWED)
        for fault in (*faults(text, MESSAGE_PATTERNS), *long_sentences(text))
    ]
    assert not hits, "\n".join(found(package, hits))


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
    assert any(faults(text, PATTERNS)) is not is_plain


@pytest.mark.parametrize(
    ("text", "is_plain"),
    [
        ("the cluster has no device; add a device", True),
        ("run `ostinato tune BASE --place-anew`", True),
        ("there is no room for the engine", True),
        ("the file is no safetensors file", False),
        ("the template cannot be used; mend it", False),
        ("its base is gone; register another one", False),
        ("not profiled, for there is no device", False),
        ("the file has 9 bytes: is it the right file?", False),
        ("it is not read any more", False),
        (" ".join(["word"] * 26), False),
        (f"{' '.join(['word'] * 25)}; {' '.join(['word'] * 25)}", True),
    ],
)
def test_the_patterns_know_plain_messages(text: str, is_plain: bool) -> None:
    assert any((*faults(text, MESSAGE_PATTERNS), *long_sentences(text))) is not is_plain


def test_the_messages_of_a_module_are_its_literals_of_three_words() -> None:
    source = '"""A docstring is none."""\nx = f"a {b(\'one two three\')} c {d:>9} e" "f g"\ny = "two words"\n'
    assert sorted(messages(source)) == [(2, "a {} c {} ef g"), (2, "one two three")]
