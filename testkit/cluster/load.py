"""A bounded load of chat requests, half of them streamed, and how each one ended."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

CLIENTS = 8
CUT = "stream ended without [DONE] or an error"
TRANSPORT = "transport "
HUNG = "hung"
HUNG_S = 300.0  # an answer to one of these takes less on the busiest machine
# A process that replaces a dead one needs the cores, and so do the tests that run at the same time.
AFTER_AN_ANSWER_S = 0.3
AFTER_AN_ERROR_S = 0.5


@dataclass(frozen=True)
class Outcome:
    """`error` is None for a whole answer."""

    begun: float
    ended: float
    error: str | None


class Load:
    """`with Load(...)`: CLIENTS threads ask one request after another until the block ends.

    A request that is not over after HUNG_S is an error `hung`.
    """

    def __init__(
        self, url: str, models: tuple[str, ...], max_tokens: int, pause_s: float = AFTER_AN_ANSWER_S
    ) -> None:
        """Each client waits `pause_s` after an answer."""
        self._url = f"{url}/v1/chat/completions"
        self._models = models
        self._max_tokens = max_tokens
        self._pause_s = pause_s
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._client, args=(i,), daemon=True) for i in range(CLIENTS)
        ]
        self.outcomes: list[Outcome] = []

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        deadline = time.monotonic() + HUNG_S + 10
        for thread in self._threads:
            thread.join(max(0.1, deadline - time.monotonic()))
        if error is None:
            assert not any(thread.is_alive() for thread in self._threads), "a request never ended"

    def successes_since(self, moment: float) -> int:
        """Whole answers to requests begun after `moment`."""
        return sum(o.error is None and o.begun > moment for o in list(self.outcomes))

    def last_failure(self) -> float:
        return max((o.ended for o in list(self.outcomes) if o.error is not None), default=0.0)

    def errors(self) -> Counter[str]:
        return Counter(o.error for o in list(self.outcomes) if o.error is not None)

    def _client(self, number: int) -> None:
        with httpx.Client(timeout=HUNG_S, trust_env=False) as http:
            turn = number
            while not self._stop.is_set():
                body = {
                    "model": self._models[turn % len(self._models)],
                    "messages": [{"role": "user", "content": f"Count from {turn} " + "la " * 30}],
                    "max_tokens": self._max_tokens,
                    "temperature": 0,
                    "stream": (turn // 2) % 2 == 0,
                }
                begun = time.monotonic()
                error = self._ask(http, body)
                ended = time.monotonic()
                if ended - begun > HUNG_S:
                    error = HUNG
                self.outcomes.append(Outcome(begun, ended, error))
                turn += 1
                self._stop.wait(self._pause_s if error is None else AFTER_AN_ERROR_S)

    def _ask(self, http: httpx.Client, body: dict[str, Any]) -> str | None:
        try:
            if not body["stream"]:
                return _judge(http.post(self._url, json=body))
            with http.stream("POST", self._url, json=body) as reply:
                if reply.status_code != 200:
                    reply.read()
                    return _judge(reply)
                return _last_event(reply)
        except httpx.TimeoutException:
            return HUNG
        except httpx.HTTPError as e:
            return f"{TRANSPORT}{type(e).__name__}"


def is_broken_off(error: str) -> bool:
    """Tell whether the connection ended before the answer did."""
    return error == CUT or error.startswith(TRANSPORT)


def _judge(reply: httpx.Response) -> str | None:
    if reply.status_code == 200:
        return None if reply.json()["choices"] else "no choices"
    try:
        return f"{reply.status_code} {reply.json()['error']['code']}"
    except (ValueError, KeyError, TypeError):
        return f"{reply.status_code} not ours: {reply.text[:80]!r}"


def _last_event(reply: httpx.Response) -> str | None:
    """The end of the stream; vLLM sends [DONE] after an error event too."""
    last = ""
    for line in reply.iter_lines():
        if line.startswith("data: "):
            last = line.removeprefix("data: ")
            if (code := error_code(last)) is not None:
                return f"event {code}"
    return None if last == "[DONE]" else CUT


def error_code(event: str) -> str | None:
    """The code of an error event; None for any other."""
    if event == "[DONE]":
        return None
    error = json.loads(event).get("error")
    return None if error is None else str(error["code"])
