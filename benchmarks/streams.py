"""Requests to an engine in this process, and when each of their tokens arrived."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Stream:
    """A request, which is sent once all before it have `after` tokens. `seed` determines its prompt: each
    request has another one unless it is given. `ids` are the tokens that came."""

    prompt: int
    tokens: int
    variant: Any = None
    after: int = 0
    seed: int | None = None
    sent_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    @property
    def ttft_ms(self) -> float:
        return (self.arrivals_s[0] - self.sent_s) * 1e3

    def gaps_ms(self, since_s: float = 0.0, until_s: float = math.inf) -> list[float]:
        """Between its tokens, for those that arrived from `since_s` on until `until_s`."""
        return [(b - a) * 1e3 for a, b in itertools.pairwise(self.arrivals_s) if since_s <= b <= until_s]


class Player:
    """Sends streams to an engine and notes when each token arrives."""

    def __init__(self, llm: Any, vocabulary: int) -> None:
        self._engine, self._vocabulary = llm.llm_engine, vocabulary
        self._sent = 0

    def play(self, streams: Sequence[Stream]) -> None:
        running: dict[str, Stream] = {}
        waiting = list(streams)
        while waiting or self._engine.has_unfinished_requests():
            while waiting and all(len(s.arrivals_s) >= waiting[0].after for s in running.values()):
                stream = waiting.pop(0)
                running[self._send(stream)] = stream
            for output in self._engine.step():
                now, tokens = time.perf_counter(), len(output.outputs[0].token_ids)
                stream = running[output.request_id]
                stream.arrivals_s += [now] * (tokens - len(stream.arrivals_s))
                stream.ids = list(output.outputs[0].token_ids)

    def _send(self, stream: Stream) -> str:
        from vllm import SamplingParams

        self._sent += 1
        name = f"stream-{self._sent}"
        seed = self._sent if stream.seed is None else stream.seed
        prompt = [5 + (37 * i + 101 * seed) % (self._vocabulary - 5) for i in range(stream.prompt)]
        sampling = SamplingParams(max_tokens=stream.tokens, temperature=0, ignore_eos=True, detokenize=False)
        stream.sent_s = time.perf_counter()
        self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling, lora_request=stream.variant)
        return name


def median(values: Iterable[float]) -> float:
    return round(float(statistics.median(values)), 3)
