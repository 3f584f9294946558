"""One load on an engine that is otherwise idle: the arrival time of each token."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from profiler.measurements import Point, Setting, SyntheticVariant, Timing

WARM_UP_STEPS = 8
MIN_REPLAYS = 4
VOCABULARY = 1000  # prompts use ids from 10 up to this; every model has more


@dataclass(frozen=True)
class Arrivals:
    """By request, the seconds from the start to the arrival of each of its tokens."""

    tokens: tuple[tuple[float, ...], ...]

    @property
    def first(self) -> list[float]:
        return [times[0] for times in self.tokens]

    @property
    def end(self) -> float:
        return max(times[-1] for times in self.tokens)

    @property
    def step_s(self) -> float:
        """The mean time of a token while all requests decode.

        That is from the last request's first token to the first request's last token. If the requests do not
        overlap enough, it is over each request's own tokens.
        """
        begin, stop = max(self.first), min(times[-1] for times in self.tokens)
        together = [sum(begin < at <= stop for at in times) for times in self.tokens]
        if min(together) >= 2:
            spans = [
                [at for at in times if begin <= at <= stop] for times in self.tokens
            ]  # the request whose first token is `begin` includes it; the others' spans begin just after
            return statistics.mean((s[-1] - s[0]) / (len(s) - 1) for s in spans if len(s) > 1)
        return statistics.mean((times[-1] - times[0]) / (len(times) - 1) for times in self.tokens)


def run(
    llm: Any, point: Point, tokens: int, seed: int, variants: Mapping[SyntheticVariant, Any] | None = None
) -> Arrivals:
    """Start `point.batch` requests at once and wait for `tokens` tokens of each (at least 2).

    `variants` are vLLM's requests for the members of the point's mix.
    """
    asked = [variants[member] for member in point.mix] if variants and point.mix else [None]
    return burst(llm, [asked[n % len(asked)] for n in range(point.batch)], point.input_tokens, tokens, seed)


def burst(llm: Any, variants: Sequence[Any], input_tokens: int, tokens: int, seed: int) -> Arrivals:
    """The same as `run`, with a request for each of `variants`: vLLM's request for one, or None for the
    base.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    sampling = SamplingParams(
        max_tokens=tokens,
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    times: dict[str, list[float]] = {}
    with _held(engine.engine_core):
        for number, variant in enumerate(variants):
            name = f"{seed}-{number}"
            times[name] = []
            prompt = {"prompt_token_ids": prompt_of(input_tokens, seed * 1009 + number)}
            engine.add_request(name, prompt, sampling, lora_request=variant)
        start = time.perf_counter()
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter() - start
        for output in outputs:
            times[output.request_id] += [now] * len(output.outputs[0].token_ids)
    return Arrivals(tuple(tuple(seconds) for seconds in times.values()))


@contextmanager
def _held(core: Any) -> Iterator[None]:
    """Hold back requests that are added within the context, so that all begin together at its end.

    An engine in another process would begin before all requests have reached it: sometimes with one prompt,
    sometimes with three. An engine in this process steps only when we call it.
    """
    call = getattr(core, "call_utility", None)
    if call is None:
        yield
        return
    call("pause_scheduler", "keep", False)
    yield
    call("resume_scheduler")


def warm_up_tokens(prefill_steps: int, tokens: int) -> int:
    """The number of tokens per request with which all requests decode together for some steps; at most
    `tokens`.

    The prefill takes `prefill_steps` steps before that, so the most frequent step is then that of the whole
    batch.
    """
    return min(tokens, prefill_steps - 1 + WARM_UP_STEPS)


def decode_ms(replays: Sequence[Sequence[float]]) -> float:
    """Milliseconds of a step in which all requests decode, from the replays of each captured graph.

    It is the longest median of a graph that was replayed several times. (A prefill step replays a graph for
    each piece of a layer.)
    """
    often = [of_graph for of_graph in replays if len(of_graph) >= MIN_REPLAYS] or replays
    return max(statistics.median(of_graph) for of_graph in often)


def prompt_of(length: int, seed: int) -> list[int]:
    return [10 + (seed * 7919 + 104729 * i) % (VOCABULARY - 10) for i in range(length)]


def timing(
    setting: Setting,
    point: Point,
    tokens: int,
    runs: list[Arrivals],
    device_step_s: tuple[float, ...],
    taken_s: float = 0.0,
) -> Timing:
    def median(of: Callable[[Arrivals], float]) -> float:
        return statistics.median(of(run) for run in runs)

    return Timing(
        setting,
        point,
        tokens,
        ttft_s=median(lambda run: statistics.mean(run.first)),
        ttft_last_s=median(lambda run: max(run.first)),
        tpot_s=median(lambda run: run.step_s),
        latency_s=median(lambda run: run.end),
        device_step_s=device_step_s,
        taken_s=taken_s,
    )
