"""The audit log as a file: who may read it, who may share it, and what becomes of lines that find no room."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from controlplane.gateway import audit as audit_module
from controlplane.gateway.audit import MAX_FILE_BYTES, AuditLog
from controlplane.gateway.metrics import audit_lost
from controlplane.repeated_lines import Rarely
from controlplane.settings import Settings


def made(home: Path, max_bytes: int = MAX_FILE_BYTES, **options: Any) -> tuple[AuditLog, CollectorRegistry]:
    registry = CollectorRegistry()
    return AuditLog(Settings(home=home, **options), audit_lost(registry), max_bytes), registry


def lost(registry: CollectorRegistry) -> float | None:
    return registry.get_sample_value("ostinato_audit_lines_lost_total")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_log_is_in_home_and_readable_by_its_owner_alone(tmp_path: Path) -> None:
    audit, registry = made(tmp_path / "home")
    audit.write({"path": "a\nb", "model": 'é"\ud800'})
    path = tmp_path / "home/audit.jsonl"
    assert path.stat().st_mode & 0o777 == 0o600
    (line,) = lines(path)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {"path": "a\nb", "model": 'é"\ud800'}
    assert lost(registry) == 0


def test_a_moved_log_is_replaced_by_a_new_one(tmp_path: Path) -> None:
    audit, _ = made(tmp_path, audit_log=str(tmp_path / "there"))
    audit.write({"n": 1})
    (tmp_path / "there").rename(tmp_path / "kept")
    audit.write({"n": 2})
    assert [lines(tmp_path / name)[0]["n"] for name in ("kept", "there")] == [1, 2]


def test_the_log_can_be_off_or_go_to_standard_output(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    off, _ = made(tmp_path, audit_log="")
    off.write({"n": 1})
    assert not off.on
    assert list(tmp_path.iterdir()) == []
    made(tmp_path, audit_log="-")[0].write({"n": 2})
    assert json.loads(capfd.readouterr().out)["n"] == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["/dev/full", "."])  # a folder cannot be written, either
def test_an_unwritable_log_loses_only_lines(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_module.log, "filters", [Rarely()])  # what other tests said does not count
    audit, registry = made(tmp_path, audit_log=where)
    for _ in range(3):
        audit.write({"n": 1})
    assert lost(registry) == 3
    assert len([r for r in caplog.records if "lost" in r.message]) == 1, "it says so once a minute"


def _write_cut(path: Path, told: Any) -> None:
    """A line of which only a part has room; then there is room again."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    audit, registry = made(path.parent, audit_log=path.name)
    audit.write({"n": 1})
    size = path.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
    audit.write({"n": 2})
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    audit.write({"n": 3})
    told.put(lost(registry))


def test_a_line_that_was_cut_off_spoils_no_other(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    told: Any = context.Queue()
    child = context.Process(target=_write_cut, args=(tmp_path / "log", told))
    child.start()
    assert told.get() == 1
    child.join()
    first, cut, last = (tmp_path / "log").read_text().splitlines()
    assert (json.loads(first)["n"], json.loads(last)["n"]) == (1, 3)
    assert len(cut) == 10


def _write_many(home: Path, who: int) -> None:
    audit, _ = made(home)
    for n in range(200):
        audit.write({"who": who, "n": n, "more": "x" * (n * 20)})


def test_several_processes_share_the_log(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(tmp_path, who)) for who in range(3)]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    found = lines(tmp_path / "audit.jsonl")
    for who in range(3):
        assert [line["n"] for line in found if line["who"] == who] == list(range(200))
    assert os.path.getsize(tmp_path / "audit.jsonl") > 3 * 200 * 1000


def test_a_full_file_is_put_aside_and_the_oldest_goes(tmp_path: Path) -> None:
    audit, registry = made(tmp_path, max_bytes=2000)
    for number in range(200):
        audit.write({"n": number, "more": "x" * 100})
    kept = [tmp_path / f"audit.jsonl.{number}" for number in range(audit_module.KEPT_FILES, 0, -1)]
    assert [path.name for path in sorted(tmp_path.glob("audit.jsonl.?"))] == sorted(p.name for p in kept)
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir())
    assert all(2000 <= path.stat().st_size < 2200 for path in kept)
    found = [line["n"] for path in (*kept, tmp_path / "audit.jsonl") if path.exists() for line in lines(path)]
    assert found == list(range(found[0], 200)), "the newest, none lost"
    assert found[0] > 0
    assert lost(registry) == 0


def test_none_is_put_aside_where_that_is_another_programs(tmp_path: Path) -> None:
    audit, _ = made(tmp_path, max_bytes=0)
    for number in range(100):
        audit.write({"n": number})
    assert [path.name for path in tmp_path.iterdir()] == ["audit.jsonl"]


def _write_into_small_files(home: Path, who: int) -> None:
    audit, _ = made(home, max_bytes=20_000)
    for n in range(100):
        audit.write({"who": who, "n": n, "more": "x" * 200})


def test_several_processes_put_a_full_file_aside_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_into_small_files, args=(tmp_path, who)) for who in range(3)]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    files = sorted(tmp_path.glob("audit.jsonl.?"), reverse=True)
    assert 3 <= len(files) <= audit_module.KEPT_FILES
    found = [line for path in (*files, tmp_path / "audit.jsonl") if path.exists() for line in lines(path)]
    for who in range(3):
        numbers = [line["n"] for line in found if line["who"] == who]
        assert numbers == sorted(numbers) == list(range(100))[-len(numbers) :]


def test_a_log_that_another_process_put_aside_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its line was written. The line is in the file that was put aside, and is not lost."""
    audit, registry = made(tmp_path, max_bytes=50)
    path, fstat = tmp_path / "audit.jsonl", os.fstat

    def moved(file: int) -> os.stat_result:
        if path.exists():
            path.rename(tmp_path / "aside")
        return fstat(file)

    monkeypatch.setattr("controlplane.gateway.audit.os.fstat", moved)
    audit.write({"n": 1, "more": "x" * 100})
    assert lost(registry) == 0
    assert [line["n"] for line in lines(tmp_path / "aside")] == [1]


def test_control_characters_of_a_name_stay_escapes(tmp_path: Path) -> None:
    audit, _ = made(tmp_path)
    audit.write({"model": "\x1b]0;owned\x07 \x9b31m \u202e"})
    assert not re.search(rb"[\x00-\x09\x0b-\x1f\x7f-\xff]", (tmp_path / "audit.jsonl").read_bytes())
