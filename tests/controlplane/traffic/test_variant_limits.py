"""The limit of variants at once: its bounds, and its way to engines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controlplane import errors
from controlplane.api.inference.engine_call import engine_call
from controlplane.management.commands import limit_variants
from controlplane.state.records import Deployment, Phase, dump, load
from controlplane.traffic.endpoints import CHAT
from controlplane.traffic.route_table import build_table
from testkit.controlplane.builders import PLACED, deployment, model, state

BASE = deployment("b", Phase.DEPLOYED, placed=replace(PLACED, plan=replace(PLACED.plan, max_variants=4)))


def test_a_limit_within_the_slots_is_taken() -> None:
    assert [limit_variants(BASE, n).max_active_variants for n in (1, 4)] == [1, 4]


@pytest.mark.parametrize("limit", [0, -1, 5])
def test_a_limit_beyond_the_slots_is_refused(limit: int) -> None:
    with pytest.raises(
        errors.InvalidRequest, match=f"expected 1 to 4 .* got {limit}; `ostinato tune b --slots N`"
    ):
        limit_variants(BASE, limit)


def test_a_limit_for_a_base_without_slots_is_refused() -> None:
    none = deployment("b", Phase.DEPLOYED, placed=replace(PLACED, plan=replace(PLACED.plan, max_variants=0)))
    with pytest.raises(errors.InvalidRequest, match="are not supported"):
        limit_variants(none, 1)


def test_a_variant_has_no_limit_of_its_own() -> None:
    with pytest.raises(errors.InvalidRequest, match="its base, 'b'"):
        limit_variants(deployment("v", Phase.DEPLOYED, "b"), 1)


@pytest.mark.parametrize(
    "early", [deployment("b", Phase.PENDING, placed=None), deployment("b", Phase.DELETING)]
)
def test_slots_must_be_known_and_stay(early: Deployment) -> None:
    with pytest.raises(errors.NotReady, match="wait until it is Deployed"):
        limit_variants(early, 1)


def test_the_limit_survives_the_store_and_older_records_have_none() -> None:
    kept = limit_variants(BASE, 2)
    assert load(Deployment, dump(kept)) == kept
    assert (
        load(Deployment, dump(kept).replace('"max_active_variants":2', '"x":0')).max_active_variants is None
    )


def test_the_limit_travels_with_requests_for_variants() -> None:
    variant = replace(model("v", Phase.READY, "b"), path="/a")
    records = (model("b", Phase.READY), variant, deployment("v", Phase.DEPLOYED, "b"))
    for base, limit in ((BASE, None), (limit_variants(BASE, 2), 2)):
        route = build_table(state(*records, base)).routes["v"]
        assert engine_call(CHAT, {"model": "v", "messages": []}, route).variant_limit == limit
