"""A deployed model that answers tasks over the OpenAI endpoints, with several requests at a time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, TypeVar

from controlplane import errors
from controlplane.client.client import Client
from controlplane.client.responses import LONGEST_PAUSE_S
from controlplane.traffic.request_terms import MAX_PROMPT_LOGPROBS, estimated_prompt
from profiler.evaluation.scoring import first_scored
from profiler.evaluation.types import Distribution, Form, Pair, Scored, Settings

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOP = 20  # log-probabilities per position: the most that engines return by default
AROUND_BYTES = 300  # size of a request without its messages: the model's name and settings
ATTEMPTS = 10  # for one request while the model is busy
# Greedy decoding, independent of the checkpoint's generation config.
GREEDY = {"temperature": 0, "repetition_penalty": 1.0}

Q = TypeVar("Q")
A = TypeVar("A")


@dataclass(frozen=True)
class Prompt:
    """A prompt's token ids, and ln p by token id at each position but the first."""

    ids: list[int]
    rows: list[Mapping[int, float]]


class ApiAnswerer:
    """An `Answerer` (profiler/evaluation/types.py). `told(done, of)` is called after each answer.

    Errors of every method: those of inference; EngineFailed also for an engine that returns no
    log-probabilities.
    """

    def __init__(
        self,
        client: Client,
        model: str,
        *,
        concurrency: int = 16,
        told: Callable[[int, int], None] = lambda done, of: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client = client
        self._model = model
        self._concurrency = concurrency
        self._told = told
        self._sleep = sleep

    def generate(self, prompts: Sequence[str], settings: Settings) -> list[str]:
        return self._all(prompts, lambda prompt: self._generated(prompt, settings))

    def score(self, pairs: Sequence[Pair]) -> list[Scored]:
        found = self._scored_rows(pairs, 0)
        return [Scored(sum(row[i] for i, row in rows), len(rows)) for rows in found]

    def distributions(self, pairs: Sequence[Pair]) -> list[list[Distribution]]:
        return [[Distribution(row) for _, row in rows] for rows in self._scored_rows(pairs, TOP)]

    def _scored_rows(self, pairs: Sequence[Pair], top: int) -> list[list[tuple[int, Mapping[int, float]]]]:
        """The token ids of each pair's continuation, with the log-probabilities at each of them."""
        contexts = [
            pair for pair in dict.fromkeys(Pair(p.context, "", p.form) for p in pairs) if pair.context
        ]
        asked = [*((context, None) for context in contexts), *((pair, top) for pair in pairs)]
        answers = self._all(asked, lambda each: self._read(*each))
        ids = {context: answer.ids for context, answer in zip(contexts, answers, strict=False)}
        return [
            _after(whole, ids.get(Pair(pair.context, "", pair.form), []))
            for pair, whole in zip(pairs, answers[len(contexts) :], strict=True)
        ]

    # --- one request ---------------------------------------------------------------------------

    def _generated(self, prompt: str, settings: Settings) -> str:
        limits = {"stop": list(settings.stop)} if settings.stop else {}
        if settings.format is Form.CHAT:
            body = {"messages": [_message("user", prompt)], "max_completion_tokens": settings.max_tokens}
            choice = self._ask(CHAT, {**body, **limits})["choices"][0]
            return choice["message"]["content"] or ""
        body = {"prompt": prompt, "max_tokens": settings.max_tokens}
        text: str = self._ask(COMPLETIONS, {**body, **limits})["choices"][0]["text"]
        return text

    def _read(self, pair: Pair, top: int | None) -> Prompt:
        """The text's token ids from the engine; with `top` also the log-probabilities at each position."""
        is_chat, body = pair.form is Form.CHAT, {"return_token_ids": True, **_asking(pair)}
        if top is not None:
            body["prompt_logprobs"] = _as_many_as_fit(top, body)
        answer = self._ask(CHAT if is_chat else COMPLETIONS, body)
        told = answer if is_chat else answer["choices"][0]
        ids, rows = told.get("prompt_token_ids"), told.get("prompt_logprobs")
        if ids is None or (rows is None and top is not None):
            raise errors.EngineFailed(
                f"the engine of '{self._model}' returns no log-probabilities of prompts (vLLM's "
                "prompt_logprobs and prompt_token_ids); start Ostinato with OSTINATO_ENGINE=vllm and deploy "
                "the model again, or evaluate lines with `prompt` and `answer` (exact match), which need none"
            )
        return Prompt(ids, [_by_id(row) for row in (rows or [])[1:]])

    def _ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send one request; waits and retries while the model is busy."""
        sent = {"model": self._model, **GREEDY, **body}
        for attempt in range(1, ATTEMPTS):
            try:
                return self._client.complete(path, sent)
            except (errors.Overloaded, errors.RateLimited) as busy:
                pause_s = busy.retry_after_s or 0.25 * 2.0**attempt
            except errors.InvalidRequest as error:
                asked = body.get("prompt") or body["messages"][0]["content"]
                raise error.saying(f"{error.message} (the request was {asked[:60]!r}...)") from error
            self._sleep(min(pause_s, LONGEST_PAUSE_S))
        return self._client.complete(path, sent)

    def _all(self, questions: Sequence[Q], ask: Callable[[Q], A]) -> list[A]:
        """The answers in order. The first error cancels the requests that have not begun."""
        with ThreadPoolExecutor(self._concurrency) as pool:
            answers = [pool.submit(ask, question) for question in questions]
            try:
                for done, answer in enumerate(as_completed(answers), 1):
                    answer.result()
                    self._told(done, len(answers))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [answer.result() for answer in answers]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _as_many_as_fit(top: int, body: Mapping[str, Any]) -> int:
    """The number of log-probabilities, at most `top`, that one request with this prompt may ask for by
    default; at least one.

    For messages a gateway counts the whole body (controlplane/api/request_bounds.py).
    """
    prompt = body.get("prompt")
    text = json.dumps(body, ensure_ascii=False) if prompt is None else prompt
    counted = len(text.encode()) + (AROUND_BYTES if prompt is None else 0)
    return min(top, max(1, MAX_PROMPT_LOGPROBS // estimated_prompt(counted) - 1))


def _asking(pair: Pair) -> dict[str, Any]:
    """The fields of a request for the shortest answer to a text."""
    if pair.form is Form.CHAT:
        return {**_conversation(pair), "max_completion_tokens": 1}
    return {"prompt": pair.context + pair.continuation, "max_tokens": 1}


def _conversation(pair: Pair) -> dict[str, Any]:
    """The conversation up to the answer's beginning, or to its end without the template's end of turn."""
    messages = [_message("user", pair.context)]
    if not pair.continuation:
        return {"messages": messages, "add_generation_prompt": True}
    messages.append(_message("assistant", pair.continuation))
    return {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}


def _by_id(row: Mapping[str, Any]) -> dict[int, float]:
    return {int(token): float(told["logprob"]) for token, told in row.items()}


def _after(whole: Prompt, context: list[int]) -> list[tuple[int, Mapping[int, float]]]:
    """The continuation's tokens."""
    start = first_scored(whole.ids, context)
    return list(zip(whole.ids[start:], whole.rows[start - 1 :], strict=True))
