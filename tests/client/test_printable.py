"""The CLI shows the contents of a stranger's file, and no terminal obeys them."""

from __future__ import annotations

import io
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane import errors
from controlplane.cli import failures, output
from controlplane.cli.failures import ExitCode
from controlplane.cli.waiting import live_line
from controlplane.printable import printable
from controlplane.runtime.replica_logs import PrintableFormatter

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\x7f\u202eabc"
SHOWN = "\\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\r\\x7f\\u202eabc"
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@given(st.text())
def test_only_what_a_terminal_obeys_is_changed(text: str) -> None:
    shown = printable(text)
    assert not OBEYED.search(shown)
    if not OBEYED.search(text):
        assert shown == text


def test_lines_tabs_and_other_scripts_stay() -> None:
    text = "a\tb\nc — 日本語 \u200d👩\u200d🔬 \u0645\u06cc\u200c"
    assert printable(text) == text
    assert printable("a\r\nb") == "a\nb"


def test_control_characters_are_escaped_in_everything_the_cli_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output.print_text(f"model {EVIL}")
    output.print_table(("NAME",), [(EVIL,)], "none")
    output.print_facts([("reason", EVIL)])
    output.print_json({"reason": EVIL})
    failures.report(EVIL, "odd", ExitCode.FAILED, as_json=False)
    failures.report(EVIL, "odd", ExitCode.FAILED, as_json=True)
    with live_line(quiet=False) as show:
        show(EVIL)
    seen = capsys.readouterr()
    for text in (seen.out, seen.err):
        assert not OBEYED.search(text)
    assert seen.out.count(SHOWN) == 3
    assert json.loads(seen.out.splitlines()[-1]) == {"reason": EVIL}, "JSON keeps it, as escapes"


def test_errors_quote_no_escape_sequence_and_logs_hold_none() -> None:
    """Stored texts and logs contain no control characters either."""
    error = errors.SourceUnreadable(f"expected an architecture, got {EVIL}")
    assert error.message == f"expected an architecture, got {SHOWN}"
    assert not OBEYED.search(json.dumps(error.body(), ensure_ascii=False))
    import logging

    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PrintableFormatter("%(message)s"))
    record = logging.LogRecord("x", logging.WARNING, "x", 1, "'%s' failed", (EVIL,), None)
    handler.emit(record)
    assert stream.getvalue() == f"'{SHOWN}' failed\n"
