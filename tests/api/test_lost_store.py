"""The state of an installation that serves is lost: no engine is stopped, nothing is acknowledged."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from controlplane.settings import Settings
from controlplane.state.installation import identity_of
from testkit.api.installations import Installation, wait_for
from testkit.in_memory import InMemoryCluster

COMPLETION = {"model": "base", "prompt": "a", "max_tokens": 2}


def state_files(installation: Installation) -> list[Path]:
    return sorted(installation.settings.home.glob("state.db*"))


def move_away(installation: Installation) -> Callable[[], None]:
    """The state's files; what is returned puts them back."""
    home, away = installation.settings.home, installation.settings.home / "away"
    away.mkdir()
    for file in state_files(installation):
        file.rename(away / file.name)

    def back() -> None:
        for file in away.iterdir():
            file.rename(home / file.name)

    return back


@contextmanager
def successor(served: Installation, home: Path | None = None) -> Iterator[Installation]:
    """Another gateway and controller in the same cluster, as after a restart of both."""
    settings = Settings(
        home=home or served.settings.home,
        allowed_roots=served.settings.allowed_roots,
        engine="echo",
        max_model_len=64,
    )
    with Installation(settings, served.files, served.cluster).running() as installation:
        yield installation


def registers(installation: Installation, name: str) -> int:
    body = {"model": name, "source": str(installation.files / "base")}
    return installation.post("/register_model", body).status_code


def end_controller(served: Installation) -> None:
    served.loop.call_soon_threadsafe(served.controlling.cancel)
    wait_for(served.controlling.done)


def looks_again(cluster: InMemoryCluster) -> None:
    """Wait until a controller has looked at the engines a few times more."""
    before = cluster.looks
    wait_for(lambda: cluster.looks > before + 3)


def test_a_registration_into_a_removed_file_is_refused_and_requests_go_on(served: Installation) -> None:
    engines, before = dict(served.cluster.engines), served.records()
    back = move_away(served)
    body = {"model": "new", "source": str(served.files / "base")}
    refused = served.post("/register_model", body)
    assert refused.status_code == 503
    assert "was removed or replaced" in refused.json()["error"]["message"]
    assert served.post("/v1/completions", COMPLETION).status_code == 200
    assert state_files(served) == [], "no new one is made"
    back()
    assert served.cluster.engines == engines
    assert served.records() == before
    assert registers(served, "new") == 202


def test_a_controller_that_finds_no_store_stops_nothing_until_it_is_back(served: Installation) -> None:
    engines, before = dict(served.cluster.engines), served.records()
    end_controller(served)
    back = move_away(served)
    with successor(served) as later:
        assert registers(later, "new") == 503
        refused = later.post("/v1/completions", COMPLETION)
        assert refused.status_code == 503, "that its models are gone is not said"
        assert "does not exist. Engines keep running" in later.http.get("/models").json()["error"]["message"]
        assert state_files(served) == []
        assert served.cluster.engines == engines
        back()
        wait_for(lambda: later.post("/v1/completions", COMPLETION).status_code == 200)
        later.register("v2", "base")
        assert later.deploy("v2")["phase"] == "Deployed"
        assert served.cluster.engines == engines
        models, deployments, _ = later.records()
        assert before[0].items() <= models.items()
        assert set(deployments) == {"base", "v1", "v2"}


@pytest.mark.parametrize("is_old", [False, True])
def test_another_installations_store_is_not_acted_on(
    served: Installation, tmp_path: Path, is_old: bool
) -> None:
    """An empty store is not used either, under engines without an installation's identity."""
    end_controller(served)
    other = tmp_path / "other"
    if is_old:
        for engine in served.cluster.engines.values():
            engine.config = replace(engine.config, installation="")
    else:
        with Installation(Settings(home=other, engine="echo"), served.files).running() as stranger:
            assert registers(stranger, "theirs") in (202, 403)
    engines = dict(served.cluster.engines)
    with successor(served, other) as later:
        assert registers(later, "new") == 503
        assert later.http.get("/models").status_code == 503
        assert served.cluster.engines == engines


def test_engines_of_another_installation_that_are_there_later_are_left_alone(
    served: Installation, tmp_path: Path
) -> None:
    """Its store was claimed before they were there."""
    own = identity_of(served.store)
    assert {engine.config.installation for engine in served.cluster.engines.values()} == {own}
    engine = next(iter(served.cluster.engines.values()))
    engine.config = replace(engine.config, installation="another")
    served.cluster.engines["stray"] = engine
    looks_again(served.cluster)
    assert "stray" in served.cluster.engines
    engine.config = replace(engine.config, installation=own)
    wait_for(lambda: "stray" not in served.cluster.engines)


def test_a_restored_backup_is_gone_on_from(served: Installation, tmp_path: Path) -> None:
    """The steps of docs/operating.md: everything ends, the file is put there, everything starts."""
    home = tmp_path / "restored"
    home.mkdir()
    end_controller(served)
    for file in state_files(served):
        shutil.copy(file, home / file.name)
    with successor(served, home) as later:
        wait_for(lambda: later.post("/v1/completions", COMPLETION).status_code == 200)
        assert identity_of(later.store) == identity_of(served.store)
        assert registers(later, "new") == 202
