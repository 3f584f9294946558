"""Models registered in several quantizations: which is deployed, how it is launched, measured and refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from controlplane import errors
from controlplane.management.commands import profile_model, register_model
from controlplane.management.schemas.models import RegisterModelRequest
from controlplane.planning.engine_config import engine_config
from controlplane.planning.placement_decision import decide
from controlplane.profiling import progress
from controlplane.settings import Settings
from controlplane.state.records import AutoRelax, Deployment, Model, ModelProfile, Phase
from controlplane.state.repository import Repository
from placement.types import EngineSizes, Intent, Inventory, Placement, Slos
from profiler.measurements import Timing, from_lines
from testkit import random_variants
from testkit.controlplane.builders import ready_base
from testkit.controlplane.world import World
from testkit.in_memory import CPU, GIB, submit
from testkit.known_models import SMOLLM2
from testkit.measured_cluster import MeasuredCluster
from workers.group.vllm_arguments import engine_arguments

pytestmark = pytest.mark.usefixtures("hurry")

ROOM = Inventory((replace(CPU, free_bytes=64 * GIB, total_bytes=64 * GIB),))
DEPLOYMENT = Deployment("b", 1, "b", Phase.PENDING, Intent.MIN_MEMORY, 16)
BOTH = {"none": 99.5, "fp8": 97.0, "int4": 90.0}


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"engine": "vllm", "engine_dtype": "bfloat16"})


@pytest.fixture
def model(files: Path) -> Model:
    return replace(ready_base(files), spec=SMOLLM2, compression=BOTH)


def test_the_least_memory_is_that_of_the_quantized_model(model: Model, settings: Settings) -> None:
    """It is launched as vLLM calls it; what cannot be launched, int4, is never chosen."""
    found = decide(model, DEPLOYMENT, ROOM, settings)
    assert (found.plan.quantization, found.estimate.accuracy) == ("fp8", 97.0)
    whole = decide(replace(model, compression={"none": 1.0}), DEPLOYMENT, ROOM, settings)
    saved = whole.ranks[0].memory_bytes - found.ranks[0].memory_bytes
    linear = 30 * (2 * 576 * 576 + 2 * 192 * 576 + 3 * 576 * 1536)
    scales = 30 * 4 * (2 * 576 + 2 * 192 + 2 * 1536 + 576)
    once = 32 * 2**20  # while it quantizes
    assert saved == pytest.approx(linear * (2 - 1) - scales - once, rel=1e-3)
    arguments = engine_arguments(engine_config(model, found, settings))
    assert arguments[arguments.index("--quantization") + 1] == "fp8_per_channel"
    assert "--quantization" not in engine_arguments(engine_config(model, whole, settings))


def test_an_accuracy_keeps_a_quantization_away(model: Model, settings: Settings) -> None:
    asked = replace(DEPLOYMENT, slos=Slos(accuracy=99.0))
    found = decide(model, asked, ROOM, settings)
    assert (found.plan.quantization, found.estimate.accuracy) == ("none", 99.5)
    with pytest.raises(errors.NoFeasiblePlan) as caught:
        decide(model, replace(DEPLOYMENT, slos=Slos(accuracy=99.9)), ROOM, settings)
    assert caught.value.details is not None
    assert caught.value.details["binding"] == "SLOs.accuracy"
    assert caught.value.details["relaxations"][0]["offered"] == 99.5


def test_less_accuracy_is_what_would_do_where_memory_is_short(model: Model, settings: Settings) -> None:
    """Between what the two quantizations take; the user may allow it beforehand."""
    small = replace(DEPLOYMENT, engine=EngineSizes(context_tokens=64, requests_at_once=1, variant_slots=1))
    sizes = [
        decide(replace(model, compression={quantization: 99.0}), small, ROOM, settings).ranks[0].memory_bytes
        for quantization in ("none", "fp8")
    ]
    short = Inventory((replace(CPU, free_bytes=sum(sizes) // 2, total_bytes=64 * GIB),))
    asked = replace(small, slos=Slos(accuracy=99.0))
    with pytest.raises(errors.NoFeasiblePlan) as caught:
        decide(model, asked, short, settings)
    offers = [one["constraint"] for one in (caught.value.details or {})["relaxations"]]
    assert "SLOs.accuracy" in offers
    relaxed = decide(model, replace(asked, auto_relax=AutoRelax(True)), short, settings)
    assert relaxed.plan.quantization == "fp8"
    assert [one.constraint.value for one in relaxed.choice.relaxed] == ["accuracy"]


def test_engines_of_float32_have_the_uncompressed_quantization_only(model: Model, settings: Settings) -> None:
    in_float32 = settings.model_copy(update={"engine_dtype": "auto"})
    assert decide(model, DEPLOYMENT, ROOM, in_float32).plan.quantization == "none"
    with pytest.raises(errors.NoFeasiblePlan, match="OSTINATO_ENGINE_DTYPE") as caught:
        decide(replace(model, compression={"fp8": 97.0}), DEPLOYMENT, ROOM, in_float32)
    assert (caught.value.details or {})["binding"] == "compressionTechnique"


def test_a_model_too_narrow_for_a_quantization_is_served_without_it(files: Path, settings: Settings) -> None:
    """Its 12 features are no multiple of 16."""
    narrow = replace(ready_base(files), compression=BOTH)
    assert decide(narrow, DEPLOYMENT, ROOM, settings).plan.quantization == "none"
    with pytest.raises(errors.NoFeasiblePlan, match="fp8 needs multiples of 16") as caught:
        decide(replace(narrow, compression={"fp8": 97.0}), DEPLOYMENT, ROOM, settings)
    assert (caught.value.details or {})["binding"] == "compressionTechnique"


# --- its profile ----------------------------------------------------------------------------------------


@pytest.fixture
def world(settings: Settings, repository: Repository, tmp_path: Path) -> World:
    random_variants.write_tiny_base(tmp_path / "tiny" / "base")
    made = World(
        settings.model_copy(update={"allowed_roots": str(tmp_path / "tiny")}), repository, tmp_path / "tiny"
    )
    made.cluster = MeasuredCluster()
    return made


async def registered(world: World, name: str, compression: dict[str, float]) -> ModelProfile:
    request = RegisterModelRequest(
        model=name, source=str(world.files / "base"), compressionTechnique=compression
    )
    assert (await world.end(submit(world.repository, register_model, request))).phase is Phase.READY
    (found,) = world.repository.read().profiles.values()
    return found.record


async def deployed(world: World, name: str) -> Placement:
    assert (await world.end(world.deploy(name, intent="minMem"))).phase is Phase.DEPLOYED
    found = world.repository.read().deployments[name].record.placement
    assert found is not None
    return found


def quantizations(profile: ModelProfile) -> dict[str, int]:
    """The number of loads that were measured in each."""
    timings = [m for m in from_lines(profile.measurements, "") if isinstance(m, Timing)]
    return {q: sum(t.setting.quantization == q for t in timings) for q in ("none", "fp8")}


async def test_a_quantization_is_measured_when_the_first_model_is_registered_for_it(world: World) -> None:
    """Only what lacks is: the second model's registration adds the loads of its quantization, the third's
    nothing."""
    async with world.controlled():
        first = await registered(world, "plain", {"none": 100.0, "int4": 90.0})
        assert quantizations(first)["fp8"] == 0
        second = await registered(world, "both", BOTH)
        assert quantizations(second)["none"] == quantizations(first)["none"]
        assert quantizations(second)["fp8"] > 0
        assert progress.is_whole(second)
        told = world.cluster.told  # type: ignore[attr-defined]
        assert await registered(world, "again", BOTH) == second
        assert told == world.cluster.told == len(second.measurements)  # type: ignore[attr-defined]


async def test_a_quantization_that_is_asked_for_while_others_are_measured_is_measured_after_them(
    world: World,
) -> None:
    assert isinstance(world.cluster, MeasuredCluster)
    async with world.controlled():
        world.cluster.go.clear()
        body = {"source": str(world.files / "base")}
        plain = RegisterModelRequest.model_validate({"model": "plain", **body})
        both = RegisterModelRequest.model_validate({"model": "both", **body, "compressionTechnique": BOTH})
        operations = [submit(world.repository, register_model, plain)]
        await world.until(lambda: world.cluster.orders)  # type: ignore[attr-defined]
        operations.append(submit(world.repository, register_model, both))
        await world.until(lambda: [p for p in world.repository.read().profiles.values() if p.record.forms])
        world.cluster.go.set()
        assert [(await world.end(one)).phase for one in operations] == [Phase.READY, Phase.READY]
    (found,) = world.repository.read().profiles.values()
    assert quantizations(found.record)["fp8"] > 0
    assert progress.is_whole(found.record)
    assert len(world.cluster.orders) == 2


async def test_a_quantization_with_a_failed_engine_leaves_the_rest_and_can_be_measured_later(
    world: World,
) -> None:
    assert isinstance(world.cluster, MeasuredCluster)
    async with world.controlled():
        first = await registered(world, "plain", {"none": 100.0})
        world.cluster.fails_after = 0
        failed = await registered(world, "both", BOTH)
        assert (failed.phase, quantizations(failed)) == (Phase.READY, quantizations(first))
        assert "before this: the engine ended" in failed.reason
        assert not progress.is_whole(failed)
        assert f"{len(first.measurements) - 1} of {failed.all_points} loads" in failed.reason
        placed = await deployed(world, "both")
        assert placed.plan.quantization == "none"
        assert "fp8 was left out: it has not been measured on such a device" in placed.choice.notes
        world.cluster.fails_after = None
        await world.end(submit(world.repository, profile_model, "both", False))
    (found,) = world.repository.read().profiles.values()
    assert quantizations(found.record)["fp8"] > 0
    assert progress.is_whole(found.record)
