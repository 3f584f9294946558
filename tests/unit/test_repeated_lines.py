"""A line that would be said ten times a second while a store is away is said once a minute."""

from __future__ import annotations

import logging

import pytest

from controlplane.repeated_lines import REPEATED, Rarely


def test_a_line_is_logged_at_once_and_then_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 1_000.0
    log = logging.getLogger("test.rarely")
    rarely = Rarely(lambda: now_s)
    log.addFilter(rarely)
    try:
        with caplog.at_level(logging.INFO, "test.rarely"):
            for tick in range(1_300):  # 130 s
                now_s = 1_000.0 + tick / 10
                log.warning("the store is away: %s", f"port {tick}", extra=REPEATED)
                if tick % 500 == 0:
                    log.warning("the lease is lost", extra=REPEATED)
                    log.info("something else")
    finally:
        log.removeFilter(rarely)
    assert caplog.messages == [
        "the store is away: port 0",
        "the lease is lost",
        "something else",
        "something else",
        "the store is away: port 600 (and 599 more times since the last such line)",
        "the lease is lost (and 1 more times since the last such line)",
        "something else",
        "the store is away: port 1200 (and 599 more times since the last such line)",
    ]
