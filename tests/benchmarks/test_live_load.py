"""The outcomes of streamed requests, for a server that answers in every way; the figures of a load, by
hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from benchmarks.live.arrivals import Mix, Share, endless, poisson
from benchmarks.live.memory import MIB, Series, growth, lasting, memory_rows
from benchmarks.live.streaming import COMPLETIONS, Ask, Kind, Outcome, Target, closed_loop, open_loop, text_of
from benchmarks.overload import report
from benchmarks.overload.classes import CLASSES, TENANTS, PriorityClass, parts, shares, within

TOKENS = 3


def event(**body: object) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


TOKEN = event(choices=[{"text": "w1"}])
USAGE = event(choices=[], usage={"prompt_tokens": 5, "completion_tokens": TOKENS})
ERROR = event(error={"message": "gone", "code": "engine_failed"})
DONE = b"data: [DONE]\n\n"
STREAMS = {
    "whole": [TOKEN, TOKEN, TOKEN, USAGE, DONE],
    "gathered": [TOKEN, TOKEN, USAGE, DONE],  # two tokens in one chunk
    "fails": [TOKEN, ERROR, DONE],
    "cut": [TOKEN],
}
REFUSALS = {
    "full": (429, {"error": {"code": "overloaded", "details": {"reason": "line"}}}, {"retry-after": "7"}),
    "late": (504, {"error": {"code": "late"}}, {}),
    "away": (503, {"error": {"code": "unavailable"}}, {}),
    "page": (502, "a proxy's page", {}),
}
EXPECTED = {
    "whole": (Kind.ANSWERED, 200, ""),
    "gathered": (Kind.ANSWERED, 200, ""),
    "fails": (Kind.FAILED, 200, "engine_failed"),
    "cut": (Kind.LOST, 200, "cut"),
    "full": (Kind.REFUSED, 429, "overloaded"),
    "late": (Kind.DROPPED, 504, "late"),
    "away": (Kind.FAILED, 503, "unavailable"),
    "page": (Kind.LOST, 502, "untyped"),
    "hangs": (Kind.LOST, 0, "hung"),
}


async def answer(request: web.Request) -> web.StreamResponse:
    model = (await request.json())["model"]
    if model == "hangs":
        await asyncio.sleep(3600)
    if model in REFUSALS:
        status, body, headers = REFUSALS[model]
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=status, text=text, headers=headers)
    reply = web.StreamResponse()
    await reply.prepare(request)
    for chunk in STREAMS[model]:
        await reply.write(chunk)
    return reply


@asynccontextmanager
async def server() -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post(COMPLETIONS, answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def asked(models: Sequence[str]) -> list[Outcome]:
    async def load() -> list[Outcome]:
        async with server() as url:
            target = Target(url, 100, limit_s=1.0 if "hangs" in models else 60.0)
            return await open_loop(target, [Ask(0.0, model, 5, TOKENS) for model in models])

    return asyncio.run(load())


@pytest.mark.parametrize("model", EXPECTED)
def test_every_request_has_one_outcome(model: str) -> None:
    (outcome,) = asked([model])
    assert (outcome.kind, outcome.status, outcome.code) == EXPECTED[model]
    assert outcome.end_s > 0


def test_an_answer_is_read_into_its_outcome() -> None:
    whole, gathered, full = asked(["whole", "gathered", "full"])
    for outcome in (whole, gathered):
        assert (outcome.tokens, outcome.prompt_tokens) == (TOKENS, 5)
        assert outcome.ttft_s is not None
        assert outcome.tpot_s == pytest.approx((outcome.end_s - outcome.ttft_s) / (TOKENS - 1))
    assert (full.retry_after_s, full.reason, full.ttft_s) == (7.0, "line", None)


def test_a_server_that_is_not_there() -> None:
    (outcome,) = asyncio.run(open_loop(Target("http://127.0.0.1:9", 100), [Ask(0.0, "m", 1, 1)]))
    assert (outcome.kind, outcome.code) == (Kind.LOST, "transport")


def test_clients_ask_again_when_they_were_answered() -> None:
    async def load() -> tuple[list[Outcome], float]:
        async with server() as url:
            mix = Mix(("whole",), ((5, TOKENS),))
            return await closed_loop(Target(url, 100), endless(mix, 1), clients=2, seconds=0.2)

    outcomes, took_s = asyncio.run(load())
    assert took_s >= 0.2
    assert len(outcomes) > 2
    assert {outcome.kind for outcome in outcomes} == {Kind.ANSWERED}


def test_prompts_have_as_many_words_and_nothing_in_common() -> None:
    ask = Ask(0.0, "m", 40, 1)
    one, other, later = text_of(ask, 1, 8192, 0), text_of(ask, 2, 8192, 0), text_of(ask, 1, 8192, 1)
    assert len(one.split()) == 40
    assert len({text.split()[0] for text in (one, other, later)}) == 3


def test_poisson_arrivals_are_of_their_rate_and_mix() -> None:
    mix = Mix(("a", "b"), ((5, 1), (9, 2)), (Share(0.25, "high"), Share(0.75, "low")))
    asks = poisson(mix, 50.0, 100.0, seed=3)
    assert asks == poisson(mix, 50.0, 100.0, seed=3)
    assert len(asks) == pytest.approx(5000, rel=0.06)  # four standard deviations
    assert [ask.at_s for ask in asks] == sorted(ask.at_s for ask in asks)
    assert sum(ask.group == "high" for ask in asks) / len(asks) == pytest.approx(0.25, abs=0.03)
    assert sum(ask.model == "a" for ask in asks) / len(asks) == pytest.approx(0.5, abs=0.03)


def test_shares_are_of_every_class_and_tenant() -> None:
    made = shares(CLASSES, 0.02, {"small": "key"})
    assert sum(share.share for share in made) == pytest.approx(1.0)
    assert {(share.group, share.tenant) for share in made} == {(c.name, t) for c in CLASSES for t in TENANTS}
    assert dict(made[0].headers) == {
        "x-ostinato-priority": "high",
        "x-ostinato-ttft-ms": "1000",
        "x-ostinato-tpot-ms": "20.000",
        "x-ostinato-late": "finish",
        "authorization": "Bearer key",
    }


def test_a_small_tenant_keeps_its_share_and_no_client_waits_longer_than_forecast() -> None:
    for factor in (3.0, 10.0):
        made = shares(CLASSES, 0.02, {}, parts(0.4, factor))
        small = sum(share.share for share in made if share.tenant == "small")
        assert factor * small == pytest.approx(0.4)
        assert sum(share.share for share in made) == pytest.approx(1.0)
    assert parts(None, 3.0) == TENANTS
    assert [one.ttft_s for one in CLASSES] == [1.0, 4.0, 15.0]
    assert [one.ttft_s for one in within(CLASSES, 2.0)] == [1.0, 2.0, 2.0]


def outcome(at_s: float, first_s: float | None, end_s: float, code: str = "", status: int = 200) -> Outcome:
    ask = Ask(at_s, "m", 5, TOKENS, "high", "small")
    return Outcome(ask, at_s, first_s, end_s, TOKENS if not code else 0, 5, status, code)


OUTCOMES = [
    outcome(0.0, 0.5, 0.7),  # TTFT 0.5, TPOT 0.1: both kept
    outcome(1.0, 1.5, 3.5),  # TPOT 1.0: not kept
    outcome(2.0, 5.0, 5.2),  # TTFT 3.0: late
    outcome(3.0, None, 3.1, "overloaded", 429),
    outcome(9.0, None, 9.2, "cut"),
]


def test_the_figures_of_a_class_equal_those_by_hand() -> None:
    (row,) = report.by_class(OUTCOMES, [PriorityClass("high", 1.0, ttft_s=1.0)], tpot_s=0.2)
    assert [row[kind.value] for kind in Kind] == [3, 1, 0, 0, 1]
    assert (row["ttft_attained"], row["both_attained"]) == (0.4, 0.2)
    assert (row["ttft_attained_of_admitted"], row["both_attained_of_admitted"]) == (0.5, 0.25)
    assert row["longest_wait_s"] == pytest.approx(3.0)
    assert row["longest_without_answer_s"] == pytest.approx(3.8)  # from 5.2 to the last arrival
    assert row["codes"] == {"429 overloaded": 1, "200 cut": 1}


def test_failed_checks_name_the_figures_that_broke_them() -> None:
    flat = {"process": "engine", "pid": 7, "pss": {"first_mib": 100.0, "last_mib": 110.0, "share": 0.1}}
    grows = {"process": "gateway", "pid": 8, "pss": {"first_mib": 100.0, "last_mib": 130.0, "share": 0.3}}
    found = report.checks(6, OUTCOMES, [flat, grows])
    assert found == {
        "every request ended once": ["6 sent, 5 ended"],
        "every error has a type": ["1 x 200 cut"],
        "every answer is whole": [],
        "every refusal says when to come again": ["1 without Retry-After"],
        "the memory of every process is flat": ["gateway (8): 100.0 to 130.0 MiB"],
    }
    assert not any(report.checks(3, OUTCOMES[:3], [flat]).values())


def test_growth_is_from_the_first_quarter_to_the_last() -> None:
    found = growth([60.0 * i for i in range(8)], [MIB * (100 + i) for i in range(8)])
    assert found == {"first_mib": 100.5, "last_mib": 106.5, "share": 0.0597, "mib_per_minute": 1.0}
    assert growth([0.0, 1.0], [1, 2]) is None


def test_a_process_that_came_later_may_grow_while_it_starts() -> None:
    at_s = [100.0 + 15 * i for i in range(16)]
    values = [MIB * min(100 + 10 * i, 180) for i in range(16)]  # grows for 120 s
    assert growth(at_s, values) == {
        "first_mib": 180.0,
        "last_mib": 180.0,
        "share": 0.0,
        "mib_per_minute": 0.0,
    }


def test_the_second_half_counts_separately_without_processes_that_came_or_went() -> None:
    """One process grows by 1 MiB a minute for 32 minutes and then stops growing; the other was there for
    ten."""
    at_s = [60.0 * i for i in range(64)]
    grown = Series("grown", at_s, *[[MIB * min(100 + i, 132) for i in range(64)]] * 2)
    gone = Series("gone", at_s[:10], *[[MIB] * 10] * 2)
    rows = memory_rows({1: grown, 2: gone})
    assert [row["process"] for row in lasting(rows)] == ["grown"]
    assert rows[0]["pss"]["mib_per_minute"] > 0.4
    assert rows[0]["pss_in_the_second_half"]["mib_per_minute"] == 0.0


def test_goodput_is_of_what_was_answered_while_the_load_lasted() -> None:
    """Ten seconds of which the first does not count: two answers of three tokens in nine of them."""
    outcomes = [
        outcome(0.1, 0.2, 0.9),  # too early
        outcome(1.0, 1.5, 2.0),
        outcome(5.0, 5.1, 10.0),
        outcome(9.0, 9.1, 10.1),  # too late
        outcome(2.0, None, 2.25, "overloaded", 429),
    ]
    found = report.against_capacity(outcomes, tokens_per_s=2.0, seconds=10.0)
    assert found["goodput_tokens_per_s"] == round(6 / 9, 1)
    assert found["goodput_of_capacity"] == round(6 / 9 / 2.0, 4)
    assert found["admitted_ttft_s"]["max"] == 0.5
    assert found["refused_after_s"]["p50"] == 0.25
