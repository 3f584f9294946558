"""The terms of a request: its headers, its body, its deployment's targets, its tenant's bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane import errors
from controlplane.management.commands import change_targets, deploy_model
from controlplane.management.schemas.deploy import DeployModelRequest, Targets
from controlplane.state.records import Deployment, Phase, ServingTargets
from controlplane.state.repository import Put
from controlplane.state.terms import LatePolicy, Priority
from controlplane.state.transactions import Context
from controlplane.traffic.endpoints import CHAT, COMPLETIONS
from controlplane.traffic.output_lengths import FIRST_GUESS, OutputLengths
from controlplane.traffic.request_terms import (
    HEADERS,
    NO_TERMS,
    UNLIMITED_TOKENS,
    RequestTerms,
    cut_at,
    estimated_tokens,
    request_terms,
)
from controlplane.traffic.route_table import build_table
from controlplane.traffic.tenants import Tenant
from placement.types import Slos
from testkit.controlplane.builders import deployment, model, state

NONE = ServingTargets()
DEFAULTS = ServingTargets(0.5, 0.05, 9.0, Priority.HIGH, LatePolicy.DROP)
SMALL = Tenant("small", max_priority=Priority.NORMAL)


def terms(
    headers: dict[str, str] | None = None,
    body: dict[str, Any] | None = None,
    targets: ServingTargets = NONE,
    **options: Any,
) -> RequestTerms:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
    return request_terms(raw, body or {}, targets, **options)


def test_a_request_without_targets_has_its_deployment_s() -> None:
    assert terms() == NO_TERMS
    assert terms({"accept": "x", "x-slo-other": "y", "x-request-id": "z"}) == NO_TERMS
    assert terms(targets=DEFAULTS) == RequestTerms(0.5, 0.05, 9.0, Priority.HIGH, LatePolicy.DROP)


def test_headers_go_before_targets() -> None:
    given = {
        "x-ostinato-ttft-ms": "250",
        "x-ostinato-tpot-ms": " 12.5 ",
        "x-ostinato-deadline-ms": "1e3",
        "x-ostinato-priority": "low",
        "x-ostinato-late": "finish",
        "x-ostinato-session": "user 7",
    }
    assert set(given) == set(HEADERS)
    expected = RequestTerms(0.25, 0.0125, 1.0, Priority.LOW, LatePolicy.FINISH, session="user 7")
    assert terms(given, targets=DEFAULTS) == expected
    assert terms({"x-slo-ttft-ms": "250", "x-slo-tpot-ms": "5"}) == RequestTerms(0.25, 0.005)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("x-ostinato-ttft-ms", "0", "milliseconds above 0"),
        ("x-ostinato-ttft-ms", "-1", "milliseconds above 0"),
        ("x-ostinato-ttft-ms", "nan", "milliseconds above 0"),
        ("x-ostinato-ttft-ms", "inf", "milliseconds above 0"),
        ("x-ostinato-ttft-ms", "", "milliseconds above 0"),
        ("x-ostinato-ttft-ms", "1_0", "milliseconds above 0"),
        ("x-ostinato-tpot-ms", "20ms", "milliseconds above 0"),
        ("x-ostinato-deadline-ms", "86400001", "at most 86400000"),
        ("x-ostinato-priority", "HIGH", "one of low, normal, high"),
        ("x-ostinato-priority", "1", "one of low, normal, high"),
        ("x-ostinato-late", "maybe", "one of finish, drop"),
        ("x-ostinato-session", "", "1 to 256 printable"),
        ("x-ostinato-session", "a\x01", "1 to 256 printable"),
        ("x-ostinato-session", "s" * 257, "1 to 256 printable"),
        ("x-ostinato-ttft", "5", "one of x-ostinato-ttft-ms, "),
    ],
)
def test_invalid_headers_are_named_with_what_was_expected_and_what_came(
    name: str, value: str, expected: str
) -> None:
    with pytest.raises(errors.InvalidRequest) as refusal:
        terms({name: value})
    assert refusal.value.param == name
    assert name in refusal.value.message
    assert expected in refusal.value.message
    assert repr((name if name not in HEADERS else value)[:100]) in refusal.value.message


@pytest.mark.parametrize("second", ["x-ostinato-ttft-ms", "x-slo-ttft-ms"])
def test_a_header_is_given_once(second: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="this header once"):
        request_terms([(b"x-ostinato-ttft-ms", b"5"), (second.encode(), b"5")], {}, NONE)


@pytest.mark.parametrize(
    ("body", "priority"),
    [
        ({"service_tier": "flex"}, Priority.LOW),
        ({"service_tier": "priority"}, Priority.HIGH),
        ({"service_tier": "auto"}, Priority.NORMAL),
        ({"service_tier": "default"}, Priority.NORMAL),
        ({"service_tier": ["flex"]}, Priority.NORMAL),
        ({"priority": -3}, Priority.HIGH),
        ({"priority": 7}, Priority.LOW),
        ({"priority": 0}, Priority.NORMAL),
        ({"priority": True}, Priority.NORMAL),
        ({"priority": "high"}, Priority.NORMAL),
        ({"priority": 7, "service_tier": "priority"}, Priority.HIGH),
    ],
)
def test_priorities_as_peers_write_them(body: dict[str, Any], priority: Priority) -> None:
    assert terms(body=body).priority is priority
    assert terms({"x-ostinato-priority": "normal"}, body).priority is Priority.NORMAL


def test_a_session_may_be_openais_cache_key() -> None:
    assert terms(body={"prompt_cache_key": "k"}).session == "k"
    assert terms({"x-ostinato-session": "s"}, {"prompt_cache_key": "k"}).session == "s"
    assert terms(body={"prompt_cache_key": 7}).session == ""


def test_a_tenants_highest_priority_lowers_defaults_and_refuses_wishes() -> None:
    assert terms(targets=DEFAULTS, tenant=SMALL).priority is Priority.NORMAL
    assert terms({"x-ostinato-priority": "low"}, targets=DEFAULTS, tenant=SMALL).priority is Priority.LOW
    for headers, body, name in (
        ({"x-ostinato-priority": "high"}, {}, "x-ostinato-priority"),
        ({}, {"service_tier": "priority"}, "service_tier"),
        ({}, {"priority": -1}, "priority"),
    ):
        with pytest.raises(
            errors.InvalidRequest, match="at most normal, the highest priority of tenant 'small'"
        ) as refusal:
            terms(headers, body, tenant=SMALL)
        assert refusal.value.param == name


@pytest.mark.parametrize(
    ("ttft_s", "deadline_s", "late", "after_s"),
    [
        (1.0, 9.0, LatePolicy.FINISH, None),
        (1.0, 9.0, LatePolicy.DROP, 1.0),
        (9.0, 1.0, LatePolicy.DROP, 1.0),
        (None, 2.0, LatePolicy.DROP, 2.0),
        (None, None, LatePolicy.DROP, None),
    ],
)
def test_a_request_is_dropped_after_its_targets(
    ttft_s: float | None, deadline_s: float | None, late: LatePolicy, after_s: float | None
) -> None:
    assert RequestTerms(ttft_s=ttft_s, deadline_s=deadline_s, late=late).dropped_after_s == after_s


@pytest.mark.parametrize(
    ("size", "body", "tokens"),
    [
        (400, {}, 132),
        (400, {"max_tokens": 8}, 108),
        (400, {"max_completion_tokens": 4, "max_tokens": 8}, 104),
        (400, {"max_tokens": 8, "n": 3}, 124),
        (400, {"max_tokens": 8, "n": 4000}, 32_100),
        (400, {"max_tokens": 8, "prompt": ["a", "b", "c"], "n": 2}, 148),
        (400, {"max_tokens": 8, "prompt": [[1, 2], [3]]}, 116),
        (400, {"max_tokens": 8, "prompt": [1, 2, 3]}, 108),
        (400, {"max_tokens": 8, "prompt": []}, 108),
        (400, {"max_tokens": -8, "n": "3"}, 100),
        (0, {"max_tokens": 0}, 1),
    ],
)
def test_a_request_s_expected_cost_counts_prompt_and_answers(
    size: int, body: dict[str, Any], tokens: int
) -> None:
    assert estimated_tokens(size, body, cut_at(CHAT, body, 32)) == tokens


def test_the_expected_cost_counts_what_the_engine_reads() -> None:
    """vLLM's completions know no `max_completion_tokens`."""
    body = {"max_completion_tokens": 0, "max_tokens": 1000}
    assert cut_at(COMPLETIONS, body, 2048) == 1000
    assert cut_at(CHAT, body, 2048) == 0
    assert cut_at(COMPLETIONS, {"max_completion_tokens": 5}, 2048) == 2048


@pytest.mark.parametrize(
    ("body", "most", "cut", "tokens"),
    [
        ({"max_tokens": 1_000_000}, 64, 64, 164),  # more is not generated, so it is not charged either
        ({"max_tokens": 8}, None, 8, 108),
        ({"max_tokens": 1_000_000}, None, 1_000_000, 100 + 2048),  # the context's
        ({}, None, None, 100 + UNLIMITED_TOKENS),
        ({"n": 3}, None, None, 100 + 3 * UNLIMITED_TOKENS),
    ],
)
def test_a_tenant_is_charged_for_the_tokens_that_may_be_generated(
    body: dict[str, Any], most: int | None, cut: int | None, tokens: int
) -> None:
    assert cut_at(CHAT, body, most) == cut
    assert estimated_tokens(400, body, cut, context=2048) == tokens


def test_an_answer_without_a_limit_is_as_long_as_others_were() -> None:
    """The router takes 0 for no limit."""
    terms = request_terms((), {}, NONE, tokens=356, prompt_tokens=100, limited=False)
    assert terms.output_limit == 0
    assert OutputLengths().expected(1, terms.output_limit) == FIRST_GUESS


_names = st.sampled_from([name.encode() for name in HEADERS]) | st.binary(max_size=30)


@given(st.lists(st.tuples(_names, st.binary(max_size=30)), max_size=4), st.sampled_from(Priority))
def test_any_headers_are_read_or_refused_by_name(
    headers: list[tuple[bytes, bytes]], highest: Priority
) -> None:
    tenant = Tenant("t", max_priority=highest)
    try:
        found = request_terms(headers, {}, DEFAULTS, tenant)
    except errors.InvalidRequest:
        return
    assert found.priority.level <= highest.level
    assert all(
        value is None or 0 < value <= 86_400 for value in (found.ttft_s, found.tpot_s, found.deadline_s)
    )


# --- the targets of deployments ------------------------------------------------------------------


def routed(base: Deployment, variant: Deployment) -> tuple[ServingTargets, ServingTargets]:
    b, v = replace(model("b", Phase.READY), path="/m"), replace(model("v", Phase.READY, "b"), path="/a")
    table = build_table(state(b, v, base, variant))
    return table.resolve("b").targets, table.resolve("v").targets


def test_a_target_that_is_left_out_is_that_of_the_slos_or_of_the_base() -> None:
    base, variant = deployment("b", Phase.DEPLOYED), deployment("v", Phase.DEPLOYED, "b")
    assert routed(base, variant) == (NONE, NONE)
    base = replace(base, slos=Slos(ttft_s=0.3, tpot_s=0.03, latency_s=5.0))
    assert routed(base, variant) == (ServingTargets(0.3, 0.03), ServingTargets(0.3, 0.03))
    base = replace(base, targets=ServingTargets(ttft_s=0.2, priority=Priority.HIGH))
    variant = replace(variant, targets=ServingTargets(late=LatePolicy.DROP), slos=Slos(ttft_s=0.9))
    assert routed(base, variant) == (
        ServingTargets(0.2, 0.03, None, Priority.HIGH, None),
        ServingTargets(0.9, 0.03, None, Priority.HIGH, LatePolicy.DROP),
    )


def test_only_targets_that_are_named_change() -> None:
    before = replace(deployment("v", Phase.DEPLOYED, "b"), targets=DEFAULTS)
    change = Targets.model_validate({"ttft_ms": None, "tpot_ms": 80, "late": "finish"})
    after = change_targets(before, change)
    assert after.targets == ServingTargets(None, 0.08, 9.0, Priority.HIGH, LatePolicy.FINISH)
    assert replace(after, targets=DEFAULTS) == before
    with pytest.raises(errors.NotReady):
        change_targets(replace(before, phase=Phase.DELETING), change)


def test_the_targets_of_a_variant_are_not_given_to_the_base_that_is_deployed_with_it() -> None:
    ready = state(model("b", Phase.READY), model("v", Phase.READY, "b"))
    asked = {"model": "v", "targets": {"deadline_ms": 1500, "priority": "low"}}
    outcome = deploy_model(ready, DeployModelRequest.model_validate(asked), Context("op", (2, 3), 1.0))
    made = {
        c.record.model: c.record.targets
        for c in outcome.changes
        if isinstance(c, Put) and isinstance(c.record, Deployment)
    }
    assert made == {"v": ServingTargets(deadline_s=1.5, priority=Priority.LOW), "b": NONE}
