"""Keys are exchanged while the installation runs, over HTTP."""

from __future__ import annotations

import logging
from hashlib import sha256
from pathlib import Path

import pytest

from controlplane.gateway import tenants_book
from testkit.api import tenants
from testkit.api.installations import Start, wait_for
from testkit.api.tenants import As, entry


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants_book, "CHECK_S", 0.02)


def test_a_key_that_is_taken_out_of_the_file_opens_nothing_any_more(
    start: Start, tmp_path: Path, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tenants.json"
    made = tenants.started(start, path, entry("a", "deployer"))
    a, b, admin = As(made, "a"), As(made, "b"), As(made, "c")
    assert [who.ask("GET", "/models").status_code for who in (a, b, admin)] == [200, 401, 401]
    both = entry("a", "inference")
    both["keys"] += [sha256(tenants.key_of("b").encode()).hexdigest()]
    tenants.write(path, both, entry("c", "admin"))
    wait_for(lambda: admin.ask("GET", "/cluster").status_code == 200)
    assert [who.ask("GET", "/models").status_code for who in (a, b)] == [403, 403], "of a new role, too"
    path.write_text("nonsense")
    wait_for(lambda: any(r.levelno == logging.ERROR and "STAY IN FORCE" in r.message for r in caplog.records))
    assert b.ask("GET", "/v1/models").status_code == 200
    both["keys"] = both["keys"][1:]
    tenants.write(path, both)
    wait_for(lambda: a.ask("GET", "/v1/models").status_code == 401)
    assert [who.ask("GET", "/v1/models").status_code for who in (b, admin)] == [200, 401]


def test_the_tenants_file_is_checked_often_enough() -> None:
    assert tenants_book.CHECK_S <= 1.0
