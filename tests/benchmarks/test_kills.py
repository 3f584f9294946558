"""The benchmark of kills: what it says of a silence, the longest time without a right answer; and how its
operators ask."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import pytest

from benchmarks.hardening.kills import Answers, Kill, Operator, _gaps, _silences, silence_s
from benchmarks.live.groups import Running, Served
from controlplane.client.client import Client
from controlplane.runtime.local import LocalCluster
from controlplane.state.repository import Repository


@pytest.mark.parametrize(
    ("answers_at_s", "expected_s"),
    [
        ([], 10.0),
        ([5.0, 25.0], 10.0),
        ([11.0, 12.0, 19.0], 7.0),
        ([10.5, 11.0, 12.0, 13.0], 7.0),
        ([14.0], 6.0),
        ([19.0, 12.0, 11.0], 7.0),
    ],
    ids=["none at all", "none within", "after some answers", "until the end", "one", "threads out of order"],
)
def test_a_silence_lies_between_two_answers_or_the_edges(
    answers_at_s: list[float], expected_s: float
) -> None:
    assert silence_s(answers_at_s, 10.0, 20.0) == expected_s


def test_a_silence_belongs_to_the_kill_before_it() -> None:
    """The engine's is from 12 to 15, and the raylet's, which was killed last, from 23 to the end."""
    killed = [Kill("engine", 10.0, 1.0), Kill("agent", 16.0, None), Kill("raylet", 20.0, 5.0)]
    answers_at_s = [10.5, 12.0, 15.0, 16.5, 18.0, 19.0, 21.0, 22.0, 23.0]
    took = [(9.0, 8.0), (12.0, 2.0), (15.0, 3.5), (16.5, 0.5), (29.0, 7.0)]  # the last began at 22
    silences = _silences(killed, Answers(at_s=answers_at_s, took=took), 30.0)
    assert [(one.kill.role, one.gap_s) for one in silences] == [
        *(("engine", 3.0), ("agent", 1.5), ("raylet", 7.0))
    ]
    assert [one.longest_s for one in silences] == [3.5, 0.5, 7.0]
    told = {role: _gaps(silences, role) for role in ("engine", "agent", "raylet", "gcs")}
    assert {role: gaps["largest"] for role, gaps in told.items()} == {
        **{"engine": 3.0, "agent": 1.5, "raylet": 7.0, "gcs": None}
    }
    assert [told[role]["replaced_after_median"] for role in ("engine", "agent", "raylet")] == [1.0, None, 5.0]


@contextmanager
def api_that_is_busy(busy: list[int]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Where it is, and which changes it took: each request but those for operations is first answered with
    what is left of `busy`."""
    left, taken = list(busy), list[tuple[str, str]]()

    class Answers(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            if self.command != "GET" and left:
                self.say(left.pop(0), {"error": {"code": "overloaded"}})
                return
            if self.command != "GET":
                taken.append((self.command, self.path))
            self.say(200, {"id": "op-1", "done": True})

        def say(self, status: int, body: Any) -> None:
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    for method in ("GET", "POST", "DELETE"):
        setattr(Answers, f"do_{method}", Answers.answer)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", taken
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def operator_of(url: str) -> Operator:
    running = Running(LocalCluster("", url, "", "", "", ""), cast("Client", None), Served("echo"), 1)
    return Operator(running, ["an-adapter"], cast("Repository", None))  # type: ignore[list-item]


@pytest.mark.parametrize("status", [429, 503])
def test_an_operator_retries_after_the_given_time(status: int) -> None:
    """One that does not leaves its name behind, and does not do what it was to do."""
    with api_that_is_busy([status, status]) as (url, taken):
        operator = operator_of(url)
        operator.change()
    assert [method for method, _ in taken] == ["POST", "DELETE"]
    assert len(operator.acknowledged) == 2


def test_an_operator_takes_a_refusal_for_an_answer() -> None:
    with api_that_is_busy([409]) as (url, taken):
        operator = operator_of(url)
        operator.change()
    assert [method for method, _ in taken] == ["DELETE"]
    assert len(operator.acknowledged) == 1


def test_no_operator_is_in_the_way_of_what_another_left() -> None:
    with api_that_is_busy([]) as (url, taken):
        for _ in range(2):
            operator_of(url).change()
    deleted = [path for method, path in taken if method == "DELETE"]
    assert len(set(deleted)) == 2
