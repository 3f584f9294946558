"""Whether a local cluster is started again, decided without one; and the file that names its supervisor."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane import errors
from controlplane.runtime import local, pidfile, supervisor
from controlplane.runtime.supervision import (
    API_GONE_S,
    CALM_S,
    PAUSES,
    Seen,
    Starts,
    counted,
    fault,
    wait_s,
)
from controlplane.settings import Settings
from controlplane.state.stores import own_store


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (Seen(), ""),
        (Seen(refused_s=API_GONE_S), ""),  # Serve may yet start its proxy again
        (
            Seen(refused_s=API_GONE_S + 1),
            f"no process has listened on the API's port for {API_GONE_S + 1:.0f} s",
        ),
        (Seen(("gcs_server",)), "gcs_server ended"),
        (Seen(("raylet",), 3.0), "raylet ended"),
        (Seen(("gcs_server", "raylet"), 500.0), "gcs_server and raylet ended"),
    ],
)
def test_unexpected_exits_are_faults(seen: Seen, why: str) -> None:
    assert fault(seen) == why


@given(lives_s=st.lists(st.floats(0, CALM_S - 1), min_size=1, max_size=20))
def test_starts_that_do_not_last_are_ever_further_apart(lives_s: list[float]) -> None:
    """A cluster that dies after each start is started at once the first time, then after pauses that
    double."""
    starts, now_s = Starts(), 1000.0
    for number, life_s in enumerate(lives_s):
        waited_s = wait_s(starts, now_s)
        pause_s = min(PAUSES.max_pause_s, PAUSES.first_pause_s * 2 ** (number - 1)) if number else 0.0
        assert waited_s == pytest.approx(max(0.0, pause_s - (now_s - starts.ended_s)) if number else 0.0)
        starts = counted(starts, now_s + waited_s, now_s + waited_s + 30)
        assert starts.count == number + 1
        now_s = starts.ended_s + life_s


def test_a_cluster_that_lasted_is_started_at_once() -> None:
    starts = Starts(7, ended_s=1000.0)
    assert wait_s(starts, 1000.0 + CALM_S) == 0
    assert counted(starts, 1000.0 + CALM_S, 1700.0) == Starts(1, 1700.0)
    assert wait_s(starts, 1000.0) == PAUSES.max_pause_s


class Played:
    """A cluster of which is seen what a test says, and which is started as often as it says."""

    def __init__(self, seen: list[Seen], fails: int = 0) -> None:
        self.seen, self.fails = seen, fails
        self.did: list[str] = []

    def look(self) -> Seen:
        return self.seen.pop(0)

    def start_again(self) -> None:
        self.did.append("start")
        if self.did.count("start") <= self.fails:
            raise errors.Unavailable("the port is taken")

    def play(self) -> list[str]:
        supervisor.supervise(
            lambda: self,  # type: ignore[arg-type, return-value]
            self.start_again,
            lambda: bool(self.seen),
            lambda pause_s: self.did.append("pause"),
        )
        return self.did


def test_the_supervisor_restarts_dead_processes_and_keeps_watching() -> None:
    gone = Seen(("raylet",))
    assert Played([Seen(), gone, Seen(), Seen()]).play() == ["pause", "start", "pause", "pause"]


def test_a_start_that_fails_is_no_end_of_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: 100.0))  # no time passes
    gone = Seen(("gcs_server",))
    with caplog.at_level(logging.WARNING, supervisor.log.name):
        assert Played([gone, gone, Seen()], fails=1).play() == ["start", "pause", "pause"]
    assert "gcs_server ended" in caplog.text
    assert "the port is taken" in caplog.text


# --- the file that names it -------------------------------------------------------------------------

SLEEPER = [sys.executable, "-c", "import time; print(flush=True); time.sleep(1000)"]


def test_the_file_names_a_process_until_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    assert pidfile.living(path) is None
    held = pidfile.take(path)
    assert held is not None
    with subprocess.Popen(SLEEPER, pass_fds=(held,), stdout=subprocess.PIPE) as process:
        pidfile.name(held, process.pid)
        os.close(held)
        assert pidfile.take(path) is None  # it has the lock from us
        found = pidfile.living(path)
        assert found is not None
        assert found.pid == process.pid
        assert pidfile.end(path)
        assert not found.is_running()
    assert pidfile.living(path) is None
    assert not pidfile.end(path)
    assert pidfile.take(path) is not None


def test_a_number_that_another_process_has_now_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    with subprocess.Popen(SLEEPER, stdout=subprocess.PIPE) as process:
        path.write_text(f'{{"pid": {process.pid}, "started": "1"}}')
        assert pidfile.living(path) is None
        assert not pidfile.end(path)
        assert process.poll() is None
        process.kill()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"pid": "x"}', '{"pid": 4194305, "started": "1"}'])
def test_a_foreign_pid_file_names_no_process(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.json").write_text(text)
    assert pidfile.living(tmp_path / "p.json") is None


def test_a_process_does_not_end_itself_by_its_pid_file(tmp_path: Path) -> None:
    held = pidfile.take(tmp_path / "p.json")
    assert held is not None
    pidfile.name(held, os.getpid())
    assert not pidfile.end(tmp_path / "p.json")


# --- gateways ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cores", "gateways"), [(1, 1), (3, 1), (4, 2), (64, 2)])
def test_two_gateways_where_there_are_cores_to_spare(cores: int, gateways: int) -> None:
    assert local.with_gateways(Settings(), cores).gateway_replicas == gateways


@pytest.mark.parametrize("said", [1, 5])
def test_the_requested_number_of_gateways_runs(said: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert local.with_gateways(Settings(gateway_replicas=said), 64).gateway_replicas == said
    monkeypatch.setenv("OSTINATO_GATEWAY_REPLICAS", str(said))
    assert local.with_gateways(Settings(), 64).gateway_replicas == said


def test_a_cluster_with_lost_state_is_not_started_again_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster is not ended either: parts of it may be left."""
    monkeypatch.setattr(local, "end_leftovers", lambda *args, **options: pytest.fail("it was ended"))
    settings = Settings(home=tmp_path)
    cluster = local.LocalCluster(
        str(tmp_path), "", "", "127.0.0.1:1", "", "", installation="0123456789abcdef"
    )
    (tmp_path / "cluster.json").write_text(json.dumps(asdict(cluster)))
    own_store(settings.resolved_store_url, tuple).claim().close()
    for _ in range(2):
        with pytest.raises(
            errors.Unavailable, match=r"installation 0123456789abcdef.* no longer in its store"
        ):
            local.start_again(settings, lambda line: None)
        (tmp_path / "state.db").unlink(missing_ok=True)
