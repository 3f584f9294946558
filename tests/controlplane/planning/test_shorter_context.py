"""A refusal offers the longest context that fits."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from controlplane import errors
from controlplane.planning.placement_decision import decide
from controlplane.planning.shorter_context import longest
from controlplane.settings import Settings
from controlplane.state.records import AutoRelax, Deployment, ExpectedLoad, Model, Phase, PlanConstraints
from placement.types import CPU, Constraint, Device, EngineSizes, Intent, Inventory, Placement
from profiler.types import DeviceRates
from testkit.known_models import llama

GIB = 1 << 30
SETTINGS = Settings(home=Path("/nowhere"))
SPEC = replace(llama(4, 512, 8, 8, 1024, 1000, 2, tied=False), max_position=320)
MODEL = Model("m", 1, Phase.READY, path="/m", spec=SPEC, compression={"none": 100.0})
WANTED = Deployment("m", 1, "m", Phase.PENDING, Intent.MIN_COST, None)
GPU = Device("n", 0, "x", 80 * GIB, 80 * GIB, DeviceRates(1e12, 1e14), "x")
HOST = Device("n", 0, CPU, 80 * GIB, 80 * GIB, DeviceRates(4e10, 1e12))


def placed(deployment: Deployment, devices: tuple[Device, ...]) -> Placement | errors.NoFeasiblePlan:
    try:
        return decide(MODEL, deployment, Inventory(devices), SETTINGS)
    except errors.NoFeasiblePlan as refusal:
        return refusal


def asked(context: int, **more: Any) -> Deployment:
    sizes = EngineSizes(context_tokens=context, requests_at_once=more.pop("requests", None), variant_slots=1)
    return replace(WANTED, engine=sizes, **more)


def holding(context: int, device: Device, spare: int = 0, **more: Any) -> tuple[Device, ...]:
    """Devices whose memory suffices for the smallest engine of this context, and little more."""
    smallest = asked(context, **{"requests": 1, **more, "load": ExpectedLoad(0.0, 1, 1)})
    found = placed(replace(smallest, intent=Intent.MIN_MEMORY), (device,))
    assert isinstance(found, Placement)
    return (replace(device, free_bytes=found.ranks[0].memory_bytes + spare),)


def offers(refusal: errors.NoFeasiblePlan, name: str) -> list[dict[str, Any]]:
    return [one for one in refusal.details["relaxations"] if one["constraint"] == name]


def by_trying(make: Any, least: int, most: int, devices: tuple[Device, ...]) -> int | None:
    """The longest context that `decide` places, of all there are."""
    fitting = [n for n in range(least, most + 1) if isinstance(placed(make(n), devices), Placement)]
    return max(fitting, default=None)


def shorter(more: dict[str, Any], tokens: int) -> dict[str, Any]:
    """The same with expected requests of at most `tokens`; prompts are cut in proportion."""
    load = more.get("load")
    if load is None or load.input_tokens + load.output_tokens <= tokens:
        return dict(more)
    inputs = max(1, load.input_tokens * tokens // (load.input_tokens + load.output_tokens))
    return {**more, "load": ExpectedLoad(0.0, inputs, tokens - inputs)}


@examples(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_offer_is_the_longest_context_that_is_placed(seed: int) -> None:
    rng = random.Random(seed)
    device, context = rng.choice((GPU, GPU, HOST)), rng.randint(24, 80)
    more: dict[str, Any] = {"intent": rng.choice(tuple(Intent)), "requests": rng.choice((None, 1, 3))}
    if rng.random() < 0.5:
        more["load"] = ExpectedLoad(0.0, rng.randint(1, 20), rng.randint(1, 20))
    devices = holding(rng.randint(16, context), device, rng.randint(-20_000, 20_000))
    outcome = placed(asked(context, **dict(more)), devices)
    best = by_trying(lambda n: asked(n, **shorter(more, n)), 16, context, devices)
    if isinstance(outcome, Placement):
        assert best == context
        return
    found = offers(outcome, "engine.contextTokens")
    assert [one["offered"] for one in found] == ([] if best is None else [best])
    for one in found:
        assert one["asked"] == context
        assert f"ask for a context of {best} tokens instead of {context}" in outcome.message


def test_lengths_that_do_not_fit_are_offered_shorter_ones() -> None:
    devices = holding(120, GPU)
    load = ExpectedLoad(0.0, 200, 100)
    refusal = placed(replace(WANTED, load=load), devices)
    assert isinstance(refusal, errors.NoFeasiblePlan)
    assert refusal.details["binding"] == "memory"
    (one,) = offers(refusal, "load")
    tokens = one["offered"]
    assert one["asked"] == 300
    assert 100 <= tokens < 300
    inputs = 200 * tokens // 300
    assert (
        f"prompts of {inputs} tokens and answers of {tokens - inputs} instead of 200 and 100" in one["text"]
    )
    shorter = ExpectedLoad(0.0, inputs, tokens - inputs)
    assert isinstance(placed(replace(WANTED, load=shorter), devices), Placement)
    longer = ExpectedLoad(0.0, inputs + 1, tokens - inputs)
    assert not isinstance(placed(replace(WANTED, load=longer), devices), Placement)


def test_an_answer_that_does_not_fit_is_offered_a_shorter_one() -> None:
    wide = replace(MODEL, spec=replace(SPEC, max_position=8192))

    def outcome(longest_answer: int | None, free: int) -> Placement | errors.NoFeasiblePlan:
        deployment = replace(WANTED, max_output_tokens=longest_answer)
        try:
            return decide(wide, deployment, Inventory((replace(GPU, free_bytes=free),)), SETTINGS)
        except errors.NoFeasiblePlan as refusal:
            return refusal

    ample = decide(
        wide,
        replace(
            WANTED, intent=Intent.MIN_MEMORY, engine=EngineSizes(requests_at_once=1, context_tokens=4096)
        ),
        Inventory((GPU,)),
        SETTINGS,
    )
    free = ample.ranks[0].memory_bytes
    refusal = outcome(8000, free)
    assert isinstance(refusal, errors.NoFeasiblePlan)
    (one,) = offers(refusal, "maxOutputLength")
    offered = int(one["offered"])
    assert 2048 < offered < 8000
    assert f"end answers at {offered:,} tokens instead of 8,000" in refusal.message
    assert isinstance(outcome(offered, free), Placement)
    assert not isinstance(outcome(offered + 1, free), Placement)


def test_the_user_may_allow_a_shorter_context() -> None:
    devices = holding(100, GPU)
    refusal = placed(asked(300), devices)
    assert isinstance(refusal, errors.NoFeasiblePlan)
    (one,) = offers(refusal, "engine.contextTokens")
    found = placed(asked(300, auto_relax=AutoRelax(True)), devices)
    assert isinstance(found, Placement)
    assert found.plan.max_model_len == one["offered"]
    assert [r.constraint for r in found.choice.relaxed] == [Constraint.ENGINE_CONTEXT]
    assert f"relaxed, as allowed: {one['text']}" in found.reason
    strict = placed(asked(300, auto_relax=AutoRelax(True, one["factor"] * 0.99)), devices)
    assert isinstance(strict, errors.NoFeasiblePlan)


def test_a_limit_that_no_context_meets_is_offered_none() -> None:
    refusal = placed(asked(300, constraints=PlanConstraints(tensor_parallel=(2,))), (GPU,))
    assert isinstance(refusal, errors.NoFeasiblePlan)
    assert offers(refusal, "engine.contextTokens") == []


def test_engines_that_are_placed_later_have_the_context_of_the_first() -> None:
    chosen = EngineSizes(context_tokens=300)
    refusal = placed(asked(300, chosen=chosen), holding(100, GPU))
    assert isinstance(refusal, errors.NoFeasiblePlan)
    assert offers(refusal, "engine.contextTokens") == []


@pytest.mark.parametrize("most", range(12))
def test_the_longest_is_found_wherever_it_is(most: int) -> None:
    assert longest(2, 12, lambda tokens: tokens <= most) == (None if most < 2 else most)
