"""A base that an older version registered is launched as it is registered now."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from controlplane.management.commands import deploy_model
from controlplane.management.schemas.deploy import DeployModelRequest
from controlplane.settings import Settings
from controlplane.state.records import Model, Phase
from controlplane.state.repository import Put, Repository
from profiler.checkpoint import declared_fingerprint
from testkit import checkpoints
from testkit.controlplane.world import World
from testkit.in_memory import submit

HERMES = "{% if tools %}{{ tools }}{% endif %}<tool_call>"


@pytest.fixture
def world(settings: Settings, repository: Repository, tmp_path: Path) -> World:
    """The folder "base" says that its head is the embedding, and holds another; it has a chat template."""
    weights = checkpoints.zeros(checkpoints.tensors(checkpoints.config()))
    weights["lm_head.weight"] = np.ones_like(weights["model.embed_tokens.weight"])
    folder = checkpoints.write_model(
        tmp_path / "files" / "base", checkpoints.config(tie_word_embeddings=True), weights
    )
    (folder / "chat_template.jinja").write_text(HERMES)
    return World(replace_roots(settings, tmp_path / "files"), repository, tmp_path / "files")


def replace_roots(settings: Settings, root: Path) -> Settings:
    return settings.model_copy(update={"allowed_roots": str(root)})


def as_before(world: World) -> Model:
    """The record as an older version wrote it: tied, and without a format of chats."""
    versioned = world.repository.read().models["base"]
    now = versioned.record
    assert now.spec is not None
    mark = declared_fingerprint(Path(now.path or ""))
    older = replace(now, spec=replace(now.spec, tied=True, fingerprint=mark), chat=None)
    world.repository.commit([Put(older, versioned.version)])
    return now


async def test_an_older_base_gets_its_head_and_chat_format_at_its_launch(world: World) -> None:
    async with world.controlled():
        await world.end(world.register("base"))
        now = as_before(world)
        assert now.spec is not None
        operation = submit(world.repository, deploy_model, DeployModelRequest(model="base"))
        assert (await world.end(operation)).phase is Phase.DEPLOYED
    record = world.repository.read().models["base"].record
    assert (record.spec, record.chat) == (now.spec, now.chat)
    (engine,) = world.cluster.engines.values()
    assert (engine.config.fingerprint, engine.config.tool_parser) == (now.spec.fingerprint, "hermes")


async def test_other_weights_are_not_taken_for_an_older_base(world: World) -> None:
    async with world.controlled():
        await world.end(world.register("base"))
        as_before(world)
        before = world.repository.read().models["base"].record
        folder = world.files / "base"
        weights = checkpoints.zeros(checkpoints.tensors(checkpoints.config()))
        weights = {name: tensor + 3 for name, tensor in weights.items()}
        save_file(weights, folder / "model.safetensors")
        await world.end(submit(world.repository, deploy_model, DeployModelRequest(model="base")))
    assert world.repository.read().models["base"].record == before
