"""docs/cli.md and the command: the document names every command, and no flag that its command does not take.

Which options a command has, its `--help` lists; each has a sentence there.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.core import TyperOption

from controlplane.cli.main import COMMANDS

DOCUMENTS = Path(__file__).parents[2]
DOCUMENT = (DOCUMENTS / "docs/cli.md").read_text(encoding="utf-8")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
OF_ALL = {"--json", "--help"}
BEFORE_THE_COMMAND = {"--url", "--debug"}
NAMES = [str(command.name) for command in COMMANDS]


def options_of(command: str) -> list[TyperOption]:
    loaded = next(each for each in COMMANDS if each.name == command).load()
    return [parameter for parameter in loaded.params if isinstance(parameter, TyperOption)]


def flags_of(command: str) -> set[str]:
    return OF_ALL.union(*({*option.opts, *option.secondary_opts} for option in options_of(command)))


def calls(text: str) -> list[tuple[str, set[str]]]:
    """The commands in code of a document, each with its flags."""
    spans = [*re.findall(r"`([^`\n]+)`", text), *re.findall(r"^    (ostinato [^\n]*)$", text, re.M)]
    words = [re.sub(r"\s#.*", "", span).removeprefix("ostinato ").split() for span in spans]
    return [(call[0], set(FLAG.findall(" ".join(call)))) for call in words if call and call[0] in NAMES]


def test_the_document_names_every_command() -> None:
    assert {command for command, _ in calls(DOCUMENT)} == set(NAMES)


@pytest.mark.parametrize("name", ["README.md", *(f"docs/{p.name}" for p in DOCUMENTS.glob("docs/*.md"))])
def test_a_command_takes_every_flag_that_a_document_gives_it(name: str) -> None:
    text = (DOCUMENTS / name).read_text(encoding="utf-8")
    unknown = [(command, flags - flags_of(command)) for command, flags in calls(text)]
    assert [(command, flags) for command, flags in unknown if flags] == []


def test_every_flag_that_the_document_names_exists() -> None:
    taken = BEFORE_THE_COMMAND.union(*map(flags_of, NAMES))
    assert set(FLAG.findall(DOCUMENT)) - taken == set()


@pytest.mark.parametrize("command", NAMES)
def test_help_explains_every_option(command: str) -> None:
    assert [option.opts[0] for option in options_of(command) if not option.help] == []
