"""Processes of the cluster killed or stopped at random under load, while names are registered again and
again.

Each acknowledged change must be there once, and every answer must be by a variant that the name meant.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.hardening.probing import waiting_for
from benchmarks.live.any_proxy import AnyProxy
from benchmarks.live.background import Background
from benchmarks.live.groups import BASE, Running
from benchmarks.live.three_hosts import HEAD, NODES, ThreeHosts
from controlplane import errors
from controlplane.state.repository import Repository
from controlplane.state.stores import open_store
from testkit.redis_server import RedisServer

AGAIN = "again"  # the name whose variant changes
ROLES = {
    "gateway": "ServeReplica:ostinato:Gateway",
    "controller": "ServeReplica:ostinato:Controller",
    "engine": "ServeReplica:model-",
    "proxy": "HAProxyManager",
    "agent": "ray::Agent",
    "gcs": "gcs_server",
    "raylet": "raylet/raylet",
}
REPLACED_ALONE = ("agent", "controller", "engine", "gateway", "proxy")
# With the GCS or the raylet, which is the node, all of Ray starts again. For hosts: all processes of a node,
# all of the head's (the GCS, Serve's controller), and a node that is unreachable for a while.
OF_HOSTS = ("node", "head", "cut")
STOPPED = "stop:"  # before a role: the process hangs for a while
EVERYTHING = (*ROLES, "redis", *OF_HOSTS, *(STOPPED + role for role in (*ROLES, "redis")))
CUT_S = 20.0  # and for this time a process is stopped
SETTLED_S = 180.0
OPERATORS = 4  # one of them gives a name another variant each time
_operators = itertools.count(1)


@dataclass(frozen=True)
class Kill:
    """`replaced_s`: until a new process of the role was there, or the one that was stopped went on; None:
    none came within SETTLED_S."""

    role: str
    at_s: float
    replaced_s: float | None


@dataclass
class Answers:
    """The clients' outcomes: `at_s` of each right answer; failures by code; answers of a wrong variant.
    `took`: for each request, when it ended, in any way, and how long it took (s)."""

    at_s: list[float] = field(default_factory=list)
    took: list[tuple[float, float]] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    stale: int = 0  # by the variant that the name meant before


@dataclass
class Meanings:
    """Which variants a name meant, each from when it was asked for until it was deleted."""

    spans: list[tuple[int, float, float]] = field(default_factory=list)

    def judge(self, uid: int, begun_s: float) -> str:
        for known, _, until_s in list(self.spans):
            if known == uid:
                return "right" if begun_s <= until_s else "stale"
        return "wrong"


class Loop(Background):
    """`with Loop(work):` calls `work` again and again in a thread, `rest_s` between two calls, until the
    block ends."""

    def __init__(self, work: Callable[[], None], rest_s: float = 0.0) -> None:
        self._work, self._rest_s = work, rest_s
        super().__init__()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._work()
            self._stop.wait(self._rest_s)


class Operator:
    """Changes registered models like a careful client: with a key each, repeated until answered, also after a
    refusal with a time to retry. Its names are its own: models that another operator could not delete are not
    in its way."""

    def __init__(self, running: Running, adapters: Sequence[Path], repository: Repository) -> None:
        self._http = _client(running)
        self._adapters, self._repository = adapters, repository
        self._made, self._number = f"made{next(_operators)}x", 0
        self.acknowledged: dict[str, tuple[str, str, Any, str]] = {}  # by key: method, path, body, operation
        self.meanings = Meanings()

    def change(self) -> None:
        """Register a variant under a name of its own, and delete it."""
        self._number += 1
        name = f"{self._made}{self._number}"
        self._register(name)
        self._end(self._ask("DELETE", f"/models/{name}"))

    def register_again(self) -> None:
        """The same name, with another variant each time: registered, deployed, undeployed, deleted."""
        self._number += 1
        asked_s = time.monotonic()
        self._register(AGAIN)
        try:
            model = self._repository.read().models.get(AGAIN)
        except errors.Unavailable:  # Redis is killed, too
            return
        if model is None:
            return
        self.meanings.spans.append((model.record.uid, asked_s, float("inf")))
        self._end(self._ask("POST", "/deploy_model", {"model": AGAIN, "maxOutputLength": 16}))
        time.sleep(0.5)
        self._end(self._ask("DELETE", f"/deployments/{AGAIN}"))
        self._end(self._ask("DELETE", f"/models/{AGAIN}"))
        self.meanings.spans[-1] = (model.record.uid, asked_s, time.monotonic())

    def verify(self) -> dict[str, Any]:
        """The same request again must name the same operation, which has ended."""
        lost, doubled, open_still = [], [], []
        for key, (method, path, body, operation) in self.acknowledged.items():
            reply = self._repeated(method, path, body, key)
            if reply is None:
                lost.append(f"{method} {path}: no answer")
            elif not reply.is_success:
                lost.append(f"{method} {path}: {reply.status_code} {reply.text[:200]}")
            elif reply.json()["id"] != operation:
                doubled.append(f"{method} {path}: {operation}, then {reply.json()['id']}")
            elif not reply.json()["done"]:
                open_still.append(operation)
        return {"acknowledged": len(self.acknowledged), "lost": lost, "doubled": doubled, "open": open_still}

    def _repeated(self, method: str, path: str, body: Any, key: str) -> httpx.Response | None:
        """The answer to the same request again: what was killed last may just be coming back."""
        reply = None
        for _ in range(300):
            with suppress(httpx.HTTPError):
                reply = self._http.request(method, path, json=body, headers={"idempotency-key": key})
                if not _comes_again(reply):
                    return reply
            time.sleep(0.2)
        return reply

    def _register(self, name: str) -> None:
        adapter = str(self._adapters[self._number % len(self._adapters)])
        self._end(self._ask("POST", "/register_model", {"model": name, "base": BASE, "adapter": adapter}))

    def _ask(self, method: str, path: str, body: Any = None) -> str | None:
        key = f"{method}-{path}-{random.getrandbits(64):x}"
        for _ in range(200):
            with suppress(httpx.HTTPError):
                reply = self._http.request(method, path, json=body, headers={"idempotency-key": key})
                if reply.is_success:
                    operation = str(reply.json()["id"])
                    self.acknowledged[key] = (method, path, body, operation)
                    return operation
                if not _comes_again(reply):
                    return None
            time.sleep(0.2)
        return None

    def _end(self, operation: str | None) -> None:
        deadline = time.monotonic() + SETTLED_S
        while operation is not None and time.monotonic() < deadline:
            with suppress(httpx.HTTPError, ValueError):
                reply = self._http.request("GET", f"/operations/{operation}")
                if reply.status_code == 404 or (reply.is_success and reply.json()["done"]):
                    return
            time.sleep(0.05)


def _comes_again(reply: httpx.Response) -> bool:
    """Whether the same request may be answered a little later."""
    return reply.status_code == 429 or reply.status_code >= 500


@dataclass(frozen=True)
class Series:
    """N kills, `between_s` apart in the mean, each of a random role of `victims` (a role that is named twice
    is chosen more often), while `clients` ask; fewer when `at_most_s` have passed. Each operator rests
    `rest_s` between two changes."""

    kills: int
    between_s: float
    seed: int
    victims: Sequence[str] = REPLACED_ALONE
    at_most_s: float = math.inf
    clients: int = 4
    rest_s: float = 0.0


def measure(
    running: Running,
    store_url: str,
    adapters: Sequence[Path],
    series: Series,
    redis: RedisServer | None = None,
    hosts: ThreeHosts | None = None,
) -> dict[str, Any]:
    """`redis` is started again with its data, and so are hosts."""
    seed, victims = series.seed, sorted(series.victims)
    choose, began_s = random.Random(seed), time.monotonic()
    with closing(open_store(store_url)) as store:
        repository = Repository(store)
        fixed = {m: repository.read().models[m].record.uid for m in running.models[1:]}
        operators = [Operator(running, adapters, repository) for _ in range(OPERATORS)]
        again = operators[-1]
        answers, struck = Answers(), list[Kill | None]()
        clients = [
            _asking(running, answers, fixed, again.meanings, random.Random(seed + n))
            for n in range(series.clients)
        ]
        changes = [operator.change for operator in operators[:-1]]
        kinds = {*REPLACED_ALONE, *(role.removeprefix(STOPPED) for role in victims)} & ROLES.keys()
        there = {kind: len(of_role(running, kind)) for kind in kinds}
        with ExitStack() as loops:
            for work in clients:
                loops.enter_context(Loop(work))
            for work in (*changes, again.register_again):
                loops.enter_context(Loop(work, series.rest_s))
            for number in range(series.kills):
                if time.monotonic() - began_s > series.at_most_s:
                    break
                time.sleep(series.between_s * choose.uniform(0.5, 1.5))
                waiting_for(lambda: _serves(running, answers, there), SETTLED_S)
                struck.append(_strike(running, choose.choice(victims), redis, hosts, choose))
                print(f"kill {number + 1}: {struck[-1]}, {len(answers.at_s)} answers", flush=True)
            waiting_for(lambda: _serves(running, answers, there), SETTLED_S)
            ended_s = time.monotonic()
        verified = [operator.verify() for operator in operators]
    killed = [one for one in struck if one is not None]
    silences = _silences(killed, answers, ended_s)
    return {
        "clients": series.clients,
        "kills": dict(Counter(one.role for one in killed)),
        "nobody_to_kill": struck.count(None),
        "not_replaced": dict(Counter(one.role for one in killed if one.replaced_s is None)),
        "gaps_s": {role: _gaps(silences, role) for role in victims},
        "in_turn": [
            [round(one.kill.at_s - silences[0].kill.at_s, 1), one.kill.role, one.gap_s, one.longest_s]
            for one in silences
        ],
        "answers": len(answers.at_s),
        "failed": dict(answers.failed),
        "wrong": answers.wrong[:10],
        "wrong_count": len(answers.wrong),
        "by_the_one_before": answers.stale,
        "registered_again": len(again.meanings.spans),
        "operations": verified,
    }


def _serves(running: Running, answers: Answers, there: Mapping[str, int]) -> bool:
    """Whether each role has as many processes as at first, every gateway, engine and address answers, and a
    right answer came within the last second. Else what is struck next may be the last that is there."""
    if not answers.at_s or answers.at_s[-1] < time.monotonic() - 1.0:
        return False
    titles = [title_of(process) for process in running.processes()]
    if any(sum(ROLES[role] in title for title in titles) < number for role, number in there.items()):
        return False
    with suppress(httpx.HTTPError, errors.OstinatoError, ValueError, LookupError):
        return (
            all(_answers_at(running, url) for url in running.urls)
            and reporting_gateways(running) == there["gateway"]
            and len(running.engine_pids()) == running.served.groups
        )
    return False


def _answers_at(running: Running, url: str) -> bool:
    body = {"model": BASE, "prompt": "w1 w2", "max_tokens": 2}
    asked = httpx.post(
        f"{url}/v1/completions", json=body, headers=running.headers, timeout=5, trust_env=False
    )
    return asked.is_success


def reporting_gateways(running: Running) -> int:
    """The number of gateways that report the address of their metrics: a gateway that is just starting does
    not. Errors: httpx.HTTPError."""
    reply = httpx.get(
        f"{running.cluster.url}/metrics/targets", headers=running.headers, timeout=30, trust_env=False
    )
    groups = reply.json() if reply.is_success else []
    return sum(len(group["targets"]) for group in groups if group["labels"]["component"] == "gateway")


def _strike(
    running: Running,
    role: str,
    redis: RedisServer | None,
    hosts: ThreeHosts | None,
    choose: random.Random,
) -> Kill | None:
    """None: no such process ran."""
    if role in OF_HOSTS and hosts is not None:
        return _strike_host(hosts, role, choose)
    if role.startswith(STOPPED):
        return _stop(running, role, redis, choose)
    if role == "redis" and redis is not None:
        redis.kill()
        killed_s = time.monotonic()
        redis.start()
        return Kill(role, killed_s, round(time.monotonic() - killed_s, 2))
    victims = of_role(running, role)
    if not victims:
        return None
    before = {p.pid for p in victims}
    killed_s = time.monotonic()
    with suppress(psutil.NoSuchProcess):
        choose.choice(victims).kill()
    return Kill(role, killed_s, waiting_for(lambda: _others(running, role, before), SETTLED_S))


def _stop(running: Running, role: str, redis: RedisServer | None, choose: random.Random) -> Kill | None:
    """One process of the role hangs for CUT_S. None: no such process ran."""
    kind = role.removeprefix(STOPPED)
    if kind == "redis":
        victims = [] if redis is None else [psutil.Process(redis.process.pid)]
    else:
        victims = of_role(running, kind)
    if not victims:
        return None
    victim, stopped_s = choose.choice(victims), time.monotonic()
    with suppress(psutil.NoSuchProcess):
        victim.suspend()
    try:
        time.sleep(CUT_S)
    finally:
        with suppress(psutil.NoSuchProcess):  # another killer ended and replaced it
            victim.resume()
    return Kill(role, stopped_s, round(time.monotonic() - stopped_s, 2))


def _strike_host(hosts: ThreeHosts, role: str, choose: random.Random) -> Kill:
    """Replaced: the host is there again, and what ran on it may still have to come."""
    host = HEAD if role == "head" else choose.choice(NODES)
    killed_s = time.monotonic()
    if role == "cut":
        hosts.hosts.cut_off(host)
        time.sleep(CUT_S)
        hosts.hosts.join(host)
    else:
        hosts.hosts.kill(host)
        hosts.start(host)
    return Kill(role, killed_s, round(time.monotonic() - killed_s, 2))


def silence_s(answers_at_s: Sequence[float], from_s: float, until_s: float) -> float:
    """The longest time without a right answer between the two moments."""
    within = [from_s, *sorted(at_s for at_s in answers_at_s if from_s < at_s < until_s), until_s]
    return max(after - before for before, after in pairwise(within))


def _others(running: Running, role: str, before: set[int]) -> bool:
    return any(p.pid not in before for p in of_role(running, role))


def of_role(running: Running, role: str) -> list[psutil.Process]:
    return [process for process in running.processes() if ROLES[role] in title_of(process)]


def title_of(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


@dataclass(frozen=True)
class Silence:
    """`gap_s`: the longest silence after a kill, until the next one came. `longest_s`: of the requests that
    were under way meanwhile."""

    kill: Kill
    gap_s: float
    longest_s: float


def _silences(killed: Sequence[Kill], answers: Answers, ended_s: float) -> list[Silence]:
    ends_s = [*(one.at_s for one in killed[1:]), ended_s]
    return [
        Silence(one, round(silence_s(answers.at_s, one.at_s, end_s), 2), _longest_s(answers, one.at_s, end_s))
        for one, end_s in zip(killed, ends_s, strict=True)
    ]


def _longest_s(answers: Answers, from_s: float, until_s: float) -> float:
    under_way = (took for at_s, took in answers.took if at_s > from_s and at_s - took < until_s)
    return round(max(under_way, default=0.0), 2)


def _gaps(silences: Sequence[Silence], role: str) -> dict[str, float | None]:
    of_role = [one for one in silences if one.kill.role == role]
    gaps = sorted(one.gap_s for one in of_role)
    backs = sorted(one.kill.replaced_s for one in of_role if one.kill.replaced_s is not None)
    return {
        "median": gaps[len(gaps) // 2] if gaps else None,
        "largest": gaps[-1] if gaps else None,
        "longest_request": max((one.longest_s for one in of_role), default=None),
        "replaced_after_median": backs[len(backs) // 2] if backs else None,
    }


def _asking(
    running: Running, answers: Answers, fixed: Mapping[str, int], meanings: Meanings, choose: random.Random
) -> Callable[[], None]:
    http = _client(running)
    names = (BASE, *fixed, AGAIN, AGAIN)

    def ask() -> None:
        name, begun_s = choose.choice(names), time.monotonic()
        body = {"model": name, "prompt": "w1 w2", "max_tokens": 2}
        try:
            reply = http.request("POST", "/v1/completions", body)
            code = "" if reply.is_success else str(reply.json()["error"]["code"])
        except (httpx.HTTPError, ValueError, LookupError) as e:
            code = type(e).__name__
        ended_s = time.monotonic()
        answers.took.append((ended_s, ended_s - begun_s))
        if name == AGAIN and code in ("model_not_found", "not_deployed", "unavailable"):  # it comes and goes
            time.sleep(0.01)
            return
        if code:
            answers.failed[code] += 1
            time.sleep(0.05)
            return
        _judge(answers, name, reply.json()["system_fingerprint"], fixed, meanings, begun_s)

    return ask


def _judge(
    answers: Answers,
    name: str,
    answerer: str,
    fixed: Mapping[str, int],
    meanings: Meanings,
    begun_s: float,
) -> None:
    if name == AGAIN:
        verdict = meanings.judge(int(answerer.removeprefix("uid-")), begun_s)
    else:
        expected = "base" if name == BASE else f"uid-{fixed[name]}"
        verdict = "right" if answerer == expected else "wrong"
    if verdict == "wrong":
        answers.wrong.append(f"{name} was answered by {answerer}")
    else:
        answers.stale += verdict == "stale"
        answers.at_s.append(time.monotonic())


def _client(running: Running) -> AnyProxy:
    return AnyProxy(running.urls or (running.cluster.url,), running.headers)
