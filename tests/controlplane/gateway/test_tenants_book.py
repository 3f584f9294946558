"""The file of tenants while gateways run: what is written there holds; what is wrong changes nothing."""

from __future__ import annotations

import json
import logging
import os
from hashlib import sha256
from pathlib import Path

import pytest

from controlplane.gateway.tenants_book import REMIND_S, TenantsBook
from controlplane.settings import Settings


def text(*keys: str) -> str:
    hashes = [sha256(key.encode()).hexdigest() for key in keys]
    return json.dumps({"tenants": [{"name": "a", "keys": hashes}]})


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "tenants.json").write_text(text("old"))
    return tmp_path / "tenants.json"


def book_of(path: Path, clock: Clock | None = None) -> TenantsBook:
    return TenantsBook(Settings(tenants=str(path), api_key="k"), clock or Clock())


def opens(book: TenantsBook, key: str) -> bool:
    return book.tenants.of_key(key.encode()) is not None


def test_keys_come_and_go_with_the_file(path: Path) -> None:
    book = book_of(path)
    before = book.tenants
    book.refresh()
    assert book.tenants is before, "it is not read again while it is the same"
    for keys in (("old", "new"), ("new",)):
        path.write_text(text(*keys))
        book.refresh()
        assert [opens(book, key) for key in ("old", "new")] == ["old" in keys, True]


def test_a_file_put_in_its_place_is_seen_though_it_is_as_old_and_as_long(path: Path, tmp_path: Path) -> None:
    book = book_of(path)
    found = path.stat()
    other = tmp_path / "other"
    other.write_text(text("new"))
    os.utime(other, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert other.stat().st_size == found.st_size
    other.rename(path)
    book.refresh()
    assert (opens(book, "old"), opens(book, "new")) == (False, True)


def test_a_kubelet_exchanges_the_folder_behind_a_link(tmp_path: Path) -> None:
    """A kubelet's update of a Secret's volume: the file is a link into `..data`, a link to a folder of its
    time."""
    for when, key in (("..2026_01", "old"), ("..2026_02", "new")):
        (tmp_path / when).mkdir()
        (tmp_path / when / "tenants.json").write_text(text(key))
    (tmp_path / "..data").symlink_to("..2026_01")
    path = tmp_path / "tenants.json"
    path.symlink_to("..data/tenants.json")
    book = book_of(path)
    (tmp_path / "..data_tmp").symlink_to("..2026_02")
    (tmp_path / "..data_tmp").rename(tmp_path / "..data")
    book.refresh()
    assert (opens(book, "old"), opens(book, "new")) == (False, True)


def test_a_file_that_is_wrong_or_gone_keeps_what_was_known_and_is_complained_of(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    book = book_of(path, clock)

    def complaints() -> list[str]:
        return [r.message for r in caplog.records if r.levelno == logging.ERROR]

    path.write_text('{"tenants": [{"name": "a", "keys": ["x"]}]}')
    for _ in range(3):
        book.refresh()
    assert len(complaints()) == 1
    assert "STAY IN FORCE" in complaints()[0]
    assert "64 lower-case" in complaints()[0]
    path.unlink()
    book.refresh()
    assert "cannot be read" in complaints()[1]
    clock.now_s += REMIND_S
    book.refresh()
    assert len(complaints()) == 3
    assert opens(book, "old")
    path.write_text(text("new"))
    book.refresh()
    assert (opens(book, "old"), opens(book, "new"), len(complaints())) == (False, True, 3)


def test_a_tenants_file_that_is_unreadable_at_first_stops_the_start(path: Path) -> None:
    path.write_text("{")
    with pytest.raises(ValueError, match="OSTINATO_TENANTS"):
        book_of(path)
