"""The effect of others' prompts on a request, and the gain of a wider TP where there are many."""

from __future__ import annotations

from dataclasses import replace

import pytest

from placement.solver.cluster import Cluster, Gpu, Link, Node
from placement.solver.plan import CandidatePlan, Shape, Stage
from placement.solver.policies.joint import Joint
from placement.solver.request import Request
from placement.solver.roofline import Roofline
from placement.types import Intent
from testkit.solver_instances import GIB, LINKS, TYPES, model

CLUSTER = Cluster((Node("n", tuple(Gpu(i, "big", 48 * GIB, 48 * GIB) for i in range(4))),), TYPES, LINKS)


def request(**changes: object) -> Request:
    figures = replace(model(32), compressions=model(32).compressions[:1])
    asked = Request("m", figures, concurrency=1, input_tokens=2048, output_tokens=64)
    return replace(asked, **changes)  # type: ignore[arg-type]


def figures(asked: Request, tp: int = 1) -> tuple[float, float]:
    shape = Shape(asked.model.compressions[0], tp, 1)
    found = Roofline(CLUSTER, asked)(CandidatePlan(shape, (Stage(32, "big", Link.FAST),), ()))
    return found.ttft_s, found.tpot_s


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
def test_prompts_wait_as_in_an_m_d_1_queue(share: float) -> None:
    """Wait rho s / (2 (1 - rho)) for prompts of s seconds; 1 - rho of the time is left for decoding."""
    ttft_s, tpot_s = figures(request())
    crowded = figures(request(rate_per_s=share / ttft_s))
    assert crowded[0] == pytest.approx(ttft_s + share * ttft_s / (2 * (1 - share)))
    assert crowded[1] == pytest.approx(tpot_s / (1 - share))


def test_a_wider_tp_gains_more_when_prompts_queue() -> None:
    alone = figures(request(), 1)[0] / figures(request(), 2)[0]
    busy = request(rate_per_s=0.6 / figures(request())[0])
    assert figures(busy, 1)[0] / figures(busy, 2)[0] > 1.2 * alone


@pytest.mark.parametrize(("rate_per_s", "tp"), [(0.0, 4), (1.0, 4), (3.0, 1), (4.0, 1)])
def test_the_load_decides_what_is_quickest(rate_per_s: float, tp: int) -> None:
    """Over slow links TP=4 decodes fast and fills prompts slowly: many prompts are better off with TP=1."""
    slow = replace(CLUSTER, link_bytes_per_s=(8e9, 8e9, 8e9))
    asked = request(intent=Intent.MIN_LATENCY, max_pp=1, concurrency=8, rate_per_s=rate_per_s)
    found = Joint().find(slow, asked)
    assert found is not None
    assert found.plan.tensor_parallel == tp
    assert found.choice.throughput_per_s >= rate_per_s
    alone = [
        Roofline(slow, asked)(
            CandidatePlan(Shape(asked.model.compressions[0], n, 1), (Stage(32, "big"),), ())
        )
        for n in (1, 2, 4)
    ]
    able = [one.latency_s for one in alone if one.throughput_per_s >= rate_per_s]
    assert found.choice.latency_s == pytest.approx(min(able), rel=0.01)
