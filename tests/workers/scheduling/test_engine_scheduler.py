"""The scheduler's handling of questions and failures while nothing runs; vLLM's part does nothing here."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from workers.scheduling.residency import Residency

ENGINE = pytest.importorskip("workers.engine.scheduler")


class OfVllm:
    """The needed part of its scheduler."""

    requests: dict[str, Any]

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request


class Scheduler(ENGINE._Variants, OfVllm):  # type: ignore[misc, name-defined]
    """An idle engine of one rank. `sent` is by receiver."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, dict[str, Any]]] = []
        self.requests = {}
        self.parallel_config = SimpleNamespace(world_size=1)
        self._lock = threading.Lock()
        self._reported = threading.Condition(self._lock)
        self._residency = Residency(2, 1)
        self._ranks = {0: b"rank"}
        self._askers: list[tuple[bytes, str, int]] = []
        self._uses: Counter[int] = Counter()
        self._socket = SimpleNamespace(send=lambda to, message: self.sent.append((to, message)))

    def ask(self, what: str, number: str, uid: int) -> None:
        self._received(b"worker", {"ask": what, "id": number, "uid": uid, "path": f"/{uid}"})

    def report(self, uid: int, did: str, **more: Any) -> None:
        """The rank's, about its newest order to read."""
        order = next(m["order"] for to, m in reversed(self.sent) if to == b"rank" and m["uid"] == uid)
        told = {"did": did, "rank": 0, "uid": uid, "slot": None, "order": order, "host": {}}
        self._received(b"rank", {**told, **more})

    def answers(self) -> dict[str, str]:
        """The error by the number of the question."""
        return {m["id"]: m.get("error", "") for to, m in self.sent if to == b"worker"}


@pytest.mark.parametrize(("did", "error"), [("prepared", ""), ("failed", "damaged")])
def test_a_request_for_a_variant_that_is_deleted_meanwhile_is_answered(did: str, error: str) -> None:
    scheduler = Scheduler()
    scheduler.ask("prepare", "0", 7)
    scheduler.ask("forget", "1", 7)
    assert scheduler.answers() == {"1": ""}
    scheduler.report(7, did, bytes=5, error=error, fault="files")
    assert scheduler.answers() == {"0": error, "1": ""}
    assert not scheduler._askers
    assert [(m["do"], m["uid"]) for to, m in scheduler.sent if to == b"rank"] == [
        ("prepare", 7),
        ("forget", 7),
    ]
    assert scheduler._residency.snapshot() == []


def request(name: str, uid: int) -> Any:
    return SimpleNamespace(request_id=name, lora_request=SimpleNamespace(lora_int_id=uid))


def test_a_reported_error_is_not_repeated_to_the_next_request() -> None:
    """It is tried again for it; but an error that a request waits to hear stays."""
    scheduler = Scheduler()
    scheduler.ask("prepare", "0", 7)
    scheduler.report(7, "failed", error="damaged", fault="files")
    assert scheduler.answers() == {"0": "damaged"}
    scheduler.add_request(request("a", 7))
    assert scheduler._residency.error(7) == ""
    scheduler.ask("prepare", "1", 7)
    scheduler.report(7, "failed", error="damaged", fault="files")
    scheduler.add_request(request("b", 7))
    assert scheduler._residency.error(7) == "damaged"
    assert list(scheduler.requests) == ["a", "b"]
