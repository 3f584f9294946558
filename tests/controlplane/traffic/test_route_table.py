"""Which names answer, and what the others say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from controlplane import errors
from controlplane.state.queries import variant_ref
from controlplane.state.records import Phase
from controlplane.traffic.route_table import RouteTable, build_table
from testkit.controlplane.builders import deployment, model, state
from workers.messages import VariantRef

BASE = replace(model("b", Phase.READY), path="/m")
V = replace(model("v", Phase.READY, "b"), path="/a", uid=7)


def table(base: Phase | None = Phase.DEPLOYED, variant: Phase | None = Phase.DEPLOYED) -> RouteTable:
    deployed = [deployment("b", base)] if base else []
    deployed += [deployment("v", variant, "b")] if variant else []
    return build_table(state(BASE, V, *deployed))


def test_a_base_and_its_variant_by_both_names() -> None:
    routes = table()
    assert routes.resolve("b").variant is None
    assert routes.resolve("v").variant == VariantRef("v", 7, "/a")
    assert routes.resolve("b:v") == routes.resolve("v")
    assert routes.resolve("v").base == "b"


@pytest.mark.parametrize("name", ["x", "", ":", "b:", ":v", "v:b", "b:b", "x:v", "b:v:v", "B", "b\0"])
def test_other_names_do_not_exist(name: str) -> None:
    with pytest.raises(errors.ModelNotFound) as refusal:
        table().resolve(name)
    assert refusal.value.code == "model_not_found"


@pytest.mark.parametrize("name", ["v", "b:v"])
def test_a_registered_model_is_not_deployed(name: str) -> None:
    with pytest.raises(errors.NotDeployed):
        table(variant=None).resolve(name)


@pytest.mark.parametrize("name", ["v", "b:v"])
@pytest.mark.parametrize(
    ("base", "variant"),
    [
        (Phase.DEPLOYED, Phase.DEPLOYING),
        (Phase.DEPLOYING, Phase.DEPLOYED),
        (Phase.DEPLOYED, Phase.DELETING),
        (None, Phase.DEPLOYED),
    ],
)
def test_a_model_that_is_being_deployed_tells_when_to_retry(
    name: str, base: Phase | None, variant: Phase
) -> None:
    with pytest.raises(errors.Unavailable) as refusal:
        table(base, variant).resolve(name)
    assert refusal.value.retry_after_s


def test_a_wrong_base_of_a_waiting_variant_is_unknown() -> None:
    with pytest.raises(errors.ModelNotFound):
        table(variant=Phase.PENDING).resolve("x:v")


def test_only_ready_variants_have_a_reference() -> None:
    for wrong in (BASE, replace(V, path=None)):
        with pytest.raises(errors.InvalidRequest):
            variant_ref(wrong)


@pytest.mark.parametrize("lost", ["deployment/b", "model/b"])
def test_unreadable_records_keep_their_routes(lost: str) -> None:
    """A rollback leaves such a record. Its variants' deployments are readable, and depend on it."""
    last, other = table(), (replace(BASE, name="o"), deployment("o", Phase.DEPLOYED))
    readable = {"model/b": deployment("b", Phase.DEPLOYED), "deployment/b": BASE}[lost]
    now = state(readable, V, deployment("v", Phase.DEPLOYED, "b"), *other)
    found = build_table(replace(now, undecodable=(lost,)), last)
    for name in ("b", "v", "b:v"):
        assert found.resolve(name) == last.resolve(name)
    assert found.resolve("o").base == "o"
    assert found.groups["b"] == last.groups["b"]
    assert last.alive <= found.alive
    with pytest.raises(errors.OstinatoError):
        build_table(now, last).resolve("b")  # it is gone


@pytest.mark.parametrize("lost", ["deployment/b", "model/b"])
@pytest.mark.parametrize(
    "left", [[V], [deployment("v", Phase.DEPLOYED, "b")], [V, deployment("v", Phase.DELETING, "b")]]
)
def test_a_deleted_record_has_no_route(lost: str, left: list[Any]) -> None:
    """A variant that is undeployed, or deleted, while its base's record cannot be read."""
    readable = {"model/b": deployment("b", Phase.DEPLOYED), "deployment/b": BASE}[lost]
    found = build_table(replace(state(readable, *left), undecodable=(lost,)), table())
    assert found.resolve("b").base == "b"
    with pytest.raises(errors.OstinatoError):
        found.resolve("v")


def test_groups_of_a_readable_deployment_come_from_its_record() -> None:
    last, now = (
        table(),
        replace(state(V, deployment("b", Phase.DEPLOYED, placed=None)), undecodable=("model/b",)),
    )
    assert last.alive
    assert build_table(now, last).alive == build_table(now).alive
