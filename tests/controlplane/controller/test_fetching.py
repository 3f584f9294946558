"""Models of a hub, from registration to eviction and back: real controller and fetches, a hub on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from controlplane.management.commands import register_model
from controlplane.management.schemas.models import RegisterModelRequest
from controlplane.settings import Settings
from controlplane.state.records import Operation, Phase
from controlplane.state.repository import Repository
from testkit.controlplane.world import World
from testkit.hub import COMMIT, HubStandIn, serving
from testkit.hub import Repository as Files
from testkit.in_memory import submit

pytestmark = pytest.mark.usefixtures("hurry")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: Path) -> Iterator[HubStandIn]:
    stand_in = HubStandIn({"org/base": Files.of(files / "base"), "org/v1": Files.of(files / "v1")})
    with serving(stand_in) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield hub


@pytest.fixture
def world(settings: Settings, repository: Repository, files: Path) -> World:
    return World(settings, repository, files)


def register(world: World, name: str, uri: str, base: str | None = None) -> Operation:
    where = {"base": base, "adapter": uri} if base else {"source": uri}
    request = RegisterModelRequest.model_validate({"model": name, **where})
    return submit(world.repository, register_model, request)


def folder_of(world: World, name: str) -> Path:
    fetched = world.repository.read().models[name].record.fetched
    assert fetched is not None
    return Path(fetched.folder)


async def test_a_base_and_an_adapter_of_a_hub_are_served_under_their_own_names(
    world: World, hub: HubStandIn
) -> None:
    async with world.controlled():
        assert (await world.end(register(world, "org/base", "org/base"))).phase is Phase.READY
        assert (
            await world.end(register(world, "org/v1", "hf://org/v1@main", "org/base"))
        ).phase is Phase.READY
        for name in ("org/base", "org/v1"):
            assert (await world.end(world.deploy(name))).phase is Phase.DEPLOYED
    model = world.repository.read().models["org/base"].record
    assert model.fetched is not None
    assert (model.source, model.fetched.uri, model.fetched.revision) == ("org/base", "org/base", COMMIT)
    assert model.path == model.fetched.folder
    assert model.path.startswith(str(world.settings.home))


async def test_an_operation_shows_the_bytes(world: World, hub: HubStandIn) -> None:
    async with world.controlled():
        ended = await world.end(register(world, "org/base", "org/base"))
    assert any(event.message.startswith("fetching: ") and "GiB" in event.message for event in ended.events)


async def test_a_node_gets_the_files_before_its_engine_starts(world: World, hub: HubStandIn) -> None:
    async with world.controlled():
        await world.end(register(world, "org/base", "org/base"))
        (folder_of(world, "org/base") / "model.safetensors").unlink()  # as on a node that lacks it
        deployed = await world.end(world.deploy("org/base"))
    assert deployed.phase is Phase.DEPLOYED
    (engine,) = world.cluster.engines.values()
    assert world.cluster.fetches[-1] == ("org/base", engine.config.ranks[0].node)
    assert (folder_of(world, "org/base") / "model.safetensors").is_file()


async def test_a_model_in_use_stays_and_an_unused_one_makes_room_and_comes_back(
    world: World, hub: HubStandIn, files: Path
) -> None:
    """Four models through a budget for one and a half."""
    size = (files / "base/model.safetensors").stat().st_size
    world.settings = world.settings.model_copy(update={"source_bytes": size * 5 // 2})
    names = [f"org/m{number}" for number in range(4)]
    for number, name in enumerate(names):
        hub.repositories[name] = replace(Files.of(files / "base"), commit=f"{number}" * 40)

    def there() -> list[str]:
        return [name for name in names if (folder_of(world, name) / "model.safetensors").is_file()]

    async with world.controlled():
        await world.end(register(world, names[0], names[0]))
        assert (await world.end(world.deploy(names[0]))).phase is Phase.DEPLOYED
        for name in names[1:]:
            assert (await world.end(register(world, name, name))).phase is Phase.READY
        assert there() == [names[0], names[3]]
        assert (await world.end(world.deploy(names[1]))).phase is Phase.DEPLOYED
        assert there() == [names[0], names[1]]


@pytest.mark.parametrize(
    ("uri", "code"),
    [
        ("s3://bucket/model", "source_not_allowed"),
        ("https://example.com/model", "source_not_allowed"),
        ("hf://org/base@v9", "source_not_found"),
        ("hf://org/absent", "source_denied"),
    ],
)
async def test_a_failed_fetch_ends_the_registration_with_its_name(
    world: World, hub: HubStandIn, uri: str, code: str
) -> None:
    async with world.controlled():
        ended = await world.end(register(world, "m", uri))
    assert ended.phase is Phase.FAILED
    assert ended.error is not None
    assert ended.error["error"]["code"] == code
    assert "m" not in world.repository.read().models


def test_a_password_in_a_uri_gets_into_no_record() -> None:
    with pytest.raises(ValidationError) as failure:
        RegisterModelRequest(model="m", source="https://user:secret@example.com/model")
    (problem,) = failure.value.errors(include_input=False)
    assert "OSTINATO_SOURCE_CREDENTIALS" in problem["msg"]
    assert "secret" not in problem["msg"]


async def test_a_fetch_that_is_killed_with_its_controller_goes_on(
    world: World, hub: HubStandIn, files: Path
) -> None:
    size = (files / "base/model.safetensors").stat().st_size
    hub.bytes_per_s = size * 2
    async with world.controlled():
        operation = register(world, "org/base", "org/base")
        await world.until(
            lambda: any(
                "GiB" in e.message for e in world.repository.read().operations[operation.id].record.events
            )
        )
    hub.bytes_per_s = 0.0
    async with world.controlled():
        assert (await world.end(operation)).phase is Phase.READY
    name = "model.safetensors"
    assert (folder_of(world, "org/base") / name).read_bytes() == (files / "base" / name).read_bytes()
