"""docs/cli.md and the command itself: each names the other's flags, for the same commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from controlplane.cli.main import COMMANDS

DOCUMENT = (Path(__file__).parents[2] / "docs/cli.md").read_text(encoding="utf-8")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
OF_ALL = {"--json", "--help"}
OF_OTHERS = {"--no-deps"}  # of pip
NAMES = [str(command.name) for command in COMMANDS]


def parts() -> list[tuple[set[str], str]]:
    """The document's rows and paragraphs about commands, each with the commands that it is about."""
    found: list[tuple[set[str], str]] = []
    for left, right in re.findall(r"^\| (`.*?) \|(.*)$", DOCUMENT.partition("## Output")[0], re.M):
        if commands := {name for name in re.findall(r"`([a-z-]+)", left) if name in NAMES}:
            found.append((commands, f"{left} {right}"))
    about: set[str] = set()
    for paragraph in re.split(r"\n\s*\n", DOCUMENT.partition("## Output")[0]):
        if starts := re.match(r"(?:(?:, | and )?\*\*[a-z -]+\*\*)+", paragraph):
            about = {name.split()[0] for name in re.findall(r"\*\*([a-z-]+)", starts[0])}
        elif paragraph.startswith("| command"):
            about = set()
        found.append((about, paragraph))
    return found


PARTS = parts()


def named_for(command: str) -> set[str]:
    return {flag for about, text in PARTS if command in about for flag in FLAG.findall(text)}


def flags_of(command: str) -> tuple[set[str], set[str]]:
    """All flags that the command takes, and of each option the first, which the document must name."""
    loaded = next(each for each in COMMANDS if each.name == command).load()
    options = [parameter for parameter in loaded.params if parameter.param_type_name == "option"]
    taken = {flag for option in options for flag in (*option.opts, *option.secondary_opts)}
    return taken, {option.opts[0] for option in options} - OF_ALL


@pytest.mark.parametrize("command", NAMES)
def test_the_document_names_every_flag_of_a_command(command: str) -> None:
    _, needed = flags_of(command)
    assert needed - named_for(command) == set()


@pytest.mark.parametrize("number", range(len(PARTS)))
def test_commands_take_every_flag_that_is_named_for_them(number: int) -> None:
    about, text = PARTS[number]
    taken = OF_ALL.union(*(flags_of(command)[0] for command in about))
    assert not about or set(FLAG.findall(text)) - taken - OF_OTHERS == set()


def test_the_document_says_what_every_command_does() -> None:
    assert set(NAMES) == set().union(*(about for about, _ in PARTS))


def test_every_flag_that_the_document_names_exists() -> None:
    taken = {"--url", "--debug"}.union(*(flags_of(command)[0] for command in NAMES))
    assert set(FLAG.findall(DOCUMENT)) - taken - OF_ALL - OF_OTHERS == set()
