"""A store that was lost, emptied or replaced is noticed before anything is read from it or acknowledged."""

from __future__ import annotations

import shutil
import sqlite3
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import redis

from controlplane.errors import Unavailable
from controlplane.state import StateStore, Write
from controlplane.state.base import Require
from controlplane.state.installation import KEY, KIND, NotOwn, OwnStore, identity_of, require_theirs
from controlplane.state.records import Model, Phase
from controlplane.state.repository import Put, Repository
from controlplane.state.stores import open_store, own_store

FILES = ("state.db", "state.db-wal", "state.db-shm")
USES: dict[str, Callable[[StateStore], object]] = {
    "commit": lambda store: store.commit([Write("model", "b", "1", 0)]),
    "snapshot": lambda store: store.snapshot(["model"]),
    "changes": lambda store: store.changes(["model"], 0),
    "revision": lambda store: store.revision(),
    "get": lambda store: store.get("model", "a"),
    "lease": lambda store: store.take_lease("controller", "other", 60),
}


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite://{tmp_path}/state.db"
    return f"{request.getfixturevalue('redis_url')}?prefix=test-{uuid.uuid4().hex}"


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[StateStore]:
    with closing(open_store(f"sqlite://{tmp_path}/state.db")) as store:
        store.commit([Write("model", "a", "1", 0)])
        yield store


def of(url: str, *running: str) -> OwnStore:
    return own_store(url, lambda: running)


# --- the identity of a store ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("identity", "is_empty", "running"),
    [
        ("", True, ()),  # a new installation
        ("", False, ()),  # a store of before there were identities
        ("", False, ("",)),  # and engines of then
        ("a", False, ()),
        ("a", False, ("a", "", "a")),
    ],
)
def test_a_store_is_that_of_engines_with_its_identity_or_of_before(
    identity: str, is_empty: bool, running: tuple[str, ...]
) -> None:
    require_theirs(identity, is_empty, running)


@pytest.mark.parametrize(
    ("identity", "is_empty", "running"),
    [
        ("", True, ("a",)),
        ("", True, ("",)),
        ("", False, ("a",)),  # a backup of before, under engines of today
        ("b", False, ("a",)),
        ("b", False, ("", "b", "a")),
    ],
)
def test_another_store_than_the_engines_is_refused_with_what_to_do(
    identity: str, is_empty: bool, running: tuple[str, ...]
) -> None:
    with pytest.raises(NotOwn, match=r"Engines keep running.*Restore the store.*ostinato down"):
        require_theirs(identity, is_empty, running)


def test_an_old_store_gets_an_identity_once(url: str) -> None:
    with closing(open_store(url)) as old:
        old.commit([Write("model", "a", "1", 0)])
        first, second = of(url, ""), of(url, "", "")
        assert first.snapshot(["model"]).entries == {"model": {"a": old.get("model", "a")}}
        identity = identity_of(old)
        assert len(identity) == 16
        assert second.revision() == first.revision() == 2
        assert of(url, identity).claim().get(KIND, KEY) == old.get(KIND, KEY)
        with pytest.raises(NotOwn):
            of(url, "another's").commit([Write("model", "b", "1", 0)])
        assert old.revision() == 2


def test_an_empty_store_is_not_believed_while_engines_run(url: str) -> None:
    running = {"a"}
    store = own_store(url, lambda: running)
    for use in USES.values():
        with pytest.raises(NotOwn):
            use(store)
    if url.startswith("sqlite"):
        assert not Path(url.removeprefix("sqlite://")).exists()
    running.clear()  # the operator ended them
    assert store.commit([Write("model", "a", "1", 0)]) == 2
    store.close()


def test_the_identity_is_no_record_of_a_state(url: str) -> None:
    with closing(of(url)) as store:
        repository = Repository(store)
        assert repository.read().models == {}
        repository.commit([Put(Model("a", 1, Phase.READY), 0)])
        assert set(repository.read().models) == {"a"}
        assert store.changes(["model"], 0) == open_store(url).changes(["model"], 0)
        assert repository.installation() == identity_of(store) != ""


def test_a_commit_requires_a_value(url: str) -> None:
    with closing(open_store(url)) as store:
        store.commit([Write("model", "a", "1:\n2", 0)])
        for wrong in (Require("model", "a", "1"), Require("model", "b", ""), Require("deployment", "a", "1")):
            with pytest.raises(Exception, match="has changed since it was read"):
                store.commit([wrong, Write("model", "b", "1", 0)])
        assert store.commit([Require("model", "a", "1:\n2"), Write("model", "b", "1", 0)]) == 2
        assert store.changes(["model"], 1) == open_store(url).changes(["model"], 1)
        entry = store.get("model", "a")
        assert entry is not None
        assert entry.version == 1, "it was not written"


# --- while it is used ----------------------------------------------------------------------------


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("file", FILES)
def test_a_removed_file_is_not_used_and_one_that_is_back_is(
    opened: StateStore, tmp_path: Path, file: str, use: str
) -> None:
    away = (tmp_path / file).rename(tmp_path / "away")
    with pytest.raises(Unavailable, match=r"was removed or replaced.*put the three files back"):
        USES[use](opened)
    away.rename(tmp_path / file)
    assert opened.snapshot(["model"]).entries["model"].keys() == {"a"}
    assert opened.commit([Write("model", "b", "1", 0)]) == 2


@pytest.mark.parametrize("use", USES)
def test_a_replaced_file_is_not_used(opened: StateStore, tmp_path: Path, use: str) -> None:
    with (
        closing(sqlite3.connect(tmp_path / "copy")) as copy,
        closing(sqlite3.connect(tmp_path / FILES[0])) as db,
    ):
        db.backup(copy)
    shutil.move(tmp_path / "copy", tmp_path / FILES[0])
    with pytest.raises(Unavailable, match="was removed or replaced"):
        USES[use](opened)
    with closing(sqlite3.connect(tmp_path / FILES[0])) as db:
        assert db.execute("SELECT key FROM entries").fetchall() == [("a",)]


def test_a_file_that_is_removed_during_a_commit_acknowledges_nothing(
    opened: StateStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def removing(*args: object) -> None:
        (tmp_path / FILES[0]).unlink(missing_ok=True)

    monkeypatch.setattr("controlplane.state.sqlite._apply", removing)
    with pytest.raises(Unavailable, match="was removed or replaced"):
        opened.commit([Write("model", "b", "1", 0)])
    assert not (tmp_path / FILES[0]).exists(), "it is not made again"


@pytest.mark.slow
@pytest.mark.parametrize("use", ["commit", "snapshot"])
@pytest.mark.parametrize("refilled", [False, True])
def test_a_redis_that_was_emptied_is_not_used(redis_url: str, use: str, refilled: bool) -> None:
    """The store is also refused where another installation began there since."""
    prefix = f"test-{uuid.uuid4().hex}"
    url = f"{redis_url}?prefix={prefix}"
    with closing(of(url)) as store, redis.Redis.from_url(redis_url) as client:
        store.commit([Write("model", "a", "1", 0)])
        client.delete(*client.keys(f"{{{prefix}}}*"))
        if refilled:
            of(url).commit([Write("model", "other", "1", 0)])
        before = open_store(url).revision()
        with pytest.raises(NotOwn, match=r"lost the records of installation [0-9a-f]{16}"):
            USES[use](store)
        assert open_store(url).revision() == before
