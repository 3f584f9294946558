"""A controller that has deltas made: registered, cut off, failed, deleted, cancelled, restarted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controlplane import errors
from controlplane.controller import compress_action
from controlplane.management.commands import delete_model, register_model
from controlplane.management.schemas.models import RegisterModelRequest
from controlplane.planning import compressing
from controlplane.settings import Settings
from controlplane.state.deltas import Recipe
from controlplane.state.records import Model, Operation, Phase
from controlplane.state.repository import Repository
from testkit.compressing_cluster import LAYERS, QUALITY, ScriptedCompressor
from testkit.controlplane.world import NODES, World
from testkit.in_memory import cancel, submit

pytestmark = pytest.mark.usefixtures("hurry")


class Compressing(World):
    cluster: ScriptedCompressor

    def __init__(self, settings: Settings, repository: Repository, files: Path) -> None:
        super().__init__(settings, repository, files)
        self.cluster = ScriptedCompressor(NODES)

    def compress(self, name: str, source: str = "base", **block: Any) -> Operation:
        request = RegisterModelRequest.model_validate(
            {
                "model": name,
                "base": "base",
                "source": str(self.files / source),
                "compression": {"method": "magnitude", **block},
            }
        )
        return submit(self.repository, register_model, request)

    def model(self, name: str) -> Model:
        return self.repository.read().models[name].record

    def folder(self, name: str) -> Path:
        return self.settings.artifacts_folder / f"{name}-{self.model(name).uid}"

    def operation(self, op: Operation) -> Operation:
        return self.repository.read().operations[op.id].record

    def promised(self) -> set[str]:
        ledgers = self.repository.read().ledgers.values()
        return {r.holder for ledger in ledgers for r in ledger.record.reservations}

    def at_share(self, name: str, share: float) -> Callable[[], bool]:
        return lambda: (delta := self.model(name).delta) is not None and delta.share >= share


@pytest.fixture
def world(
    settings: Settings, repository: Repository, files: Path, monkeypatch: pytest.MonkeyPatch
) -> Compressing:
    monkeypatch.setattr(compress_action, "LOOK_S", 0.005)
    return Compressing(settings, repository, files)


async def test_a_fine_tune_becomes_a_variant_of_its_base(world: Compressing) -> None:
    world.cluster.quality = QUALITY
    async with world.controlled():
        await world.end(world.register("base"))
        assert (await world.end(world.compress("v"))).phase is Phase.READY
        model = world.model("v")
        assert (model.phase, model.adapter, model.path) == (
            Phase.READY,
            str(world.folder("v") / "delta"),
            str(world.folder("v") / "delta"),
        )
        assert model.compression == {"none": pytest.approx(95.0)}, "0.76 of 0.8"
        assert model.delta is not None
        assert model.delta.artifact is not None
        assert model.delta.artifact.layer_errors == {"q_proj": 0.1}
        assert "5.0 times smaller" in model.reason
        assert world.promised() == set()
        for name in ("base", "v"):
            assert (await world.end(world.deploy(name))).phase is Phase.DEPLOYED


async def test_progress_of_a_compression_is_visible(
    world: Compressing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compress_action, "LOOK_S", 0.0)  # every line is noted
    async with world.controlled():
        await world.end(world.register("base"))
        world.cluster.go.clear()
        op = world.compress("v")
        await world.until(lambda: world.cluster.running and world.promised())
        assert (world.model("v").phase, world.promised()) == (Phase.COMPRESSING, {"compressing:v"})
        world.cluster.go.set()
        await world.end(op)
    events = [event.message for event in world.operation(op).events]
    assert any(f"layer {LAYERS} of {LAYERS}, about 8 s left" in message for message in events), events


async def test_an_interrupted_compression_continues(world: Compressing) -> None:
    world.cluster.cuts = 3
    async with world.controlled():
        await world.end(world.register("base"))
        op = await world.end(world.compress("v"))
    assert op.phase is Phase.READY
    assert len(world.cluster.asked) == 4, "each began once more"
    assert len({request.folder for request in world.cluster.asked}) == 1
    assert any("SIGKILL" in event.message for event in world.operation(op).events)


async def test_a_compression_without_progress_fails(world: Compressing) -> None:
    world.cluster.cuts, world.cluster.stuck = 99, True
    async with world.controlled():
        await world.end(world.register("base"))
        op = await world.end(world.compress("v"))
    assert op.error is not None
    assert op.error["error"]["code"] == "compression_failed"
    assert "SIGKILL" in op.error["error"]["message"]
    assert (world.model("v").phase, world.promised()) == (Phase.FAILED, set())


async def test_an_incompressible_model_fails_at_once_with_the_reason(world: Compressing) -> None:
    world.cluster.failure = "expected a fine-tune of the base, got another architecture"
    async with world.controlled():
        await world.end(world.register("base"))
        op = await world.end(world.compress("v"))
        assert op.error is not None
        assert op.error["error"]["message"] == world.cluster.failure
        assert len(world.cluster.asked) == 1
        assert (world.model("v").phase, world.model("v").reason) == (Phase.FAILED, world.cluster.failure)
        with pytest.raises(errors.NotReady):
            world.deploy("v")
        assert (await world.end(submit(world.repository, delete_model, "v"))).phase is Phase.DELETED
        world.cluster.failure = ""
        assert (await world.end(world.compress("v"))).phase is Phase.READY


@pytest.mark.parametrize(
    ("source", "block", "error"),
    [
        ("missing", {}, "source_unreadable"),
        ("../elsewhere", {}, "path_not_allowed"),
        ("base", {"evaluation": "/etc/passwd"}, "path_not_allowed"),
        ("base", {"evaluation": "{files}/missing.jsonl"}, "source_unreadable"),
        ("base", {"calibration": "{files}/base"}, "source_unreadable"),
    ],
)
async def test_files_that_cannot_be_read(
    world: Compressing, source: str, block: dict[str, str], error: str
) -> None:
    named = {key: value.format(files=world.files) for key, value in block.items()}
    async with world.controlled():
        await world.end(world.register("base"))
        op = await world.end(world.compress("v", source, **named))
    assert op.error is not None
    assert op.error["error"]["code"] == error
    assert world.model("v").phase is Phase.FAILED
    assert world.cluster.asked == []


async def test_deleting_ends_a_compression_and_removes_its_files(world: Compressing) -> None:
    async with world.controlled():
        await world.end(world.register("base"))
        world.cluster.go.clear()
        registering = world.compress("v")
        await world.until(lambda: world.cluster.running)
        folder = world.folder("v")
        deleting = submit(world.repository, delete_model, "v")
        assert (await world.end(deleting)).phase is Phase.DELETED
        assert world.operation(registering).phase is Phase.CANCELLED
        assert (world.cluster.running, folder.exists(), world.promised()) == (0, False, set())
        assert "v" not in world.repository.read().models


async def test_cancelling_does_the_same(world: Compressing) -> None:
    async with world.controlled():
        await world.end(world.register("base"))
        world.cluster.go.clear()
        op = world.compress("v")
        await world.until(lambda: world.cluster.running)
        folder = world.folder("v")
        cancel(world.repository, op.id)
        assert (await world.end(op)).phase is Phase.CANCELLED
        await world.until(lambda: "v" not in world.repository.read().models)
        assert (world.cluster.running, folder.exists(), world.promised()) == (0, False, set())


async def test_deleting_a_ready_variant_removes_only_its_files(world: Compressing) -> None:
    async with world.controlled():
        await world.end(world.register("base"))
        await world.end(world.compress("v"))
        folder, tuned = world.folder("v"), world.model("v").source
        assert (folder / "delta").is_dir()
        assert (await world.end(submit(world.repository, delete_model, "v"))).phase is Phase.DELETED
    assert not folder.exists()
    assert (world.files / "base" / "config.json").exists(), tuned


async def test_a_killed_controller_s_successor_goes_on(world: Compressing) -> None:
    async with world.controlled():
        await world.end(world.register("base"))
        world.cluster.go.clear()
        op = world.compress("v")
        await world.until(world.at_share("v", 0.0))
        await world.until(lambda: world.cluster.running)
    assert world.model("v").phase is Phase.COMPRESSING
    world.cluster.go.set()
    async with world.controlled():
        assert (await world.end(op)).phase is Phase.READY
    assert len(world.cluster.asked) == 2


async def test_a_deletion_is_finished_by_a_killed_controller_s_successor(world: Compressing) -> None:
    async with world.controlled():
        await world.end(world.register("base"))
        await world.end(world.compress("v"))
    folder = world.folder("v")
    op = submit(world.repository, delete_model, "v")
    assert folder.exists()
    async with world.controlled():
        assert (await world.end(op)).phase is Phase.DELETED
    assert not folder.exists()


async def test_each_node_compresses_one_model_at_a_time_until_all_are_done(world: Compressing) -> None:
    async with world.controlled():
        await world.end(world.register("base"))
        world.cluster.go.clear()
        ops = [world.compress(name) for name in ("u", "v", "w")]
        await world.until(lambda: world.cluster.running == 2)
        await world.until(lambda: any("its turn" in world.model(name).reason for name in ("u", "v", "w")))
        assert world.cluster.most == 2
        world.cluster.go.set()
        assert {(await world.end(op)).phase for op in ops} == {Phase.READY}
    assert world.cluster.most == 2
    assert {request.folder.name.split("-")[0] for request in world.cluster.asked} == {"u", "v", "w"}


async def test_the_base_stays_while_a_fine_tune_of_it_is_compressed(world: Compressing) -> None:
    async with world.controlled():
        await world.end(world.register("base"))
        world.cluster.go.clear()
        op = world.compress("v")
        with pytest.raises(errors.InUse, match="v"):
            submit(world.repository, delete_model, "base")
        world.cluster.go.set()
        await world.end(op)


async def test_an_accuracy_that_was_asked_for_decides(world: Compressing) -> None:
    world.cluster.quality = QUALITY  # 95% are left
    async with world.controlled():
        await world.end(world.register("base"))
        await world.end(world.compress("v"))
        with pytest.raises(errors.NoFeasiblePlan, match="95"):
            world.deploy("v", SLOs={"accuracy": 96})
        assert (await world.end(world.deploy("v", SLOs={"accuracy": 94}))).phase is Phase.DEPLOYED
        base = world.repository.read().deployments["base"].record
        assert base.slos.accuracy == pytest.approx(94 / 0.95)


async def test_a_compression_beyond_its_time_limit_is_ended_and_frees_its_slot(
    world: Compressing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat template that loops lives, and says so every few seconds."""
    monkeypatch.setattr(compress_action, "LIMIT_S", 0.05)
    async with world.controlled():
        await world.end(world.register("base"))
        world.cluster.go.clear()
        ended = await world.end(world.compress("v"))
        assert ended.phase is Phase.FAILED
        assert "its time limit" in ended.reason
        assert world.cluster.running == 0
        assert world.promised() == set()


async def test_a_stuck_compression_is_restarted_and_then_fails(
    world: Compressing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compress_action, "STALLED_S", 0.05)
    async with world.controlled():
        await world.end(world.register("base"))
        world.cluster.go.clear()
        ended = await world.end(world.compress("v"))
        assert ended.phase is Phase.FAILED
        assert "3 attempts in a row stopped at" in ended.reason
        assert "made no progress for" in ended.reason
        assert len(world.cluster.asked) == 3


async def test_the_reserved_memory_is_what_the_texts_can_take(world: Compressing) -> None:
    """The memory is not for the requested size, 100,000 rows of a million tokens, of a file of 20 bytes."""
    texts = world.settings.home.parent / "texts.txt"
    texts.write_text("a text of 20 bytes.\n")
    world.settings = world.settings.model_copy(update={"allowed_roots": f"{world.files}:{texts.parent}"})
    async with world.controlled():
        await world.end(world.register("base"))
        op = world.compress("v", method="deltacompress", rows=100_000, tokens=1 << 20, calibration=str(texts))
        assert (await world.end(op)).phase is Phase.READY
        delta, spec = world.model("v").delta, world.model("base").spec
    assert delta is not None
    assert spec is not None
    assert delta.text_bytes == 20
    few = compressing.needed_bytes(spec, Recipe("deltacompress", rows=1, tokens=20))
    assert world.cluster.asked[0].memory_bytes == few
