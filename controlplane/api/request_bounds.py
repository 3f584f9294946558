"""Bounds of one request to an engine that it shares with others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from controlplane import errors
from controlplane.template_arguments import TEMPLATE_ARGUMENTS
from controlplane.traffic.grammar_bounds import check_grammar
from controlplane.traffic.request_terms import (
    MAX_PROMPT_LOGPROBS,
    choices_of,
    estimated_prompt,
    prompts_of,
    sequences_of,
)

# An engine reads each of these for every token, or for every word of its vocabulary.
LISTS = (
    "stop",
    "stop_sequences",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "logit_bias",
    "logprob_token_ids",
)
# An engine compiles these, with some work for every word of its vocabulary.
GRAMMARS = ("response_format", "structured_outputs")
# Fields with a `format`, which is compiled.
FORMATS = ("text", "output_config")
MAX_SEQUENCES = 16  # of a request
MAX_WORDS = 256  # in one list; OpenAI allows four stop sequences
MAX_GRAMMAR_BYTES = 64 << 10
DEEPEST = 32  # levels of a grammar; schemas written by people have at most ten
_COMPILED = frozenset({*GRAMMARS, *FORMATS, "tools"})
# The fields that `check` may refuse; most requests have none of them.
_BOUNDED = frozenset({*LISTS, *_COMPILED, "n", "prompt", "prompt_logprobs", "echo"})
_FREE_CHOICES = (None, "auto", "none")  # of tools: the engine compiles nothing for them


@dataclass(frozen=True)
class Bounds:
    """`sequences`: answers of one request. `words`: entries of a word list. `grammar_bytes`: size of all
    grammars of a request. `prompt_logprobs`: prompt tokens times log-probabilities per token.
    `template_arguments`: allowed arguments of the chat template."""

    sequences: int = MAX_SEQUENCES
    words: int = MAX_WORDS
    grammar_bytes: int = MAX_GRAMMAR_BYTES
    prompt_logprobs: int = MAX_PROMPT_LOGPROBS
    template_arguments: frozenset[str] = TEMPLATE_ARGUMENTS


DEFAULTS = Bounds()


def check(
    body: Mapping[str, Any], body_bytes: int, bounds: Bounds, requests_at_once: int | None = None
) -> None:
    """Check a body that passed `check_fields`. Its raw size was `body_bytes`. The model's engine runs
    `requests_at_once` requests.

    Errors: InvalidRequest, with the field's name and its limit.
    """
    if body.keys().isdisjoint(_BOUNDED):
        return
    _check_sequences(body, bounds.sequences, requests_at_once)
    _check_lists(body, bounds.words)
    _check_grammars(body, bounds.grammar_bytes)
    _check_prompt_logprobs(body, body_bytes, bounds.prompt_logprobs)


def _check_sequences(body: Mapping[str, Any], bound: int, at_once: int | None) -> None:
    """Bound the answers of a request: each is a sequence of the engine, and one request must not take all
    sequences."""
    most = bound if at_once is None else min(bound, max(1, at_once // 2))
    if (asked := sequences_of(body)) > most:
        raise errors.InvalidRequest(
            f"the request asks for {asked} answers (`n` for each prompt), but at most {most} are allowed "
            "(never more than half of what its engine runs at once); send several requests",
            param="n" if body.get("n") not in (None, 1) else "prompt",
        )


def _check_lists(body: Mapping[str, Any], most: int) -> None:
    for name in LISTS:
        value = body.get(name)
        if isinstance(value, list | dict) and len(value) > most:
            raise errors.InvalidRequest(
                f"{name} has {len(value)} entries, but at most {most} are allowed; send fewer",
                param=name,
            )


def grammars_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that an engine compiles into a grammar for the answer, and what it compiles of each."""
    if body.keys().isdisjoint(_COMPILED):
        return {}
    found = {name: body[name] for name in GRAMMARS if isinstance(body.get(name), dict | list | str)}
    for name in FORMATS:
        settings = body.get(name)
        if isinstance(settings, dict) and isinstance(settings.get("format"), dict):
            found[name] = settings["format"]
    if body.get("tools") and not _is_free(body.get("tool_choice")):
        found["tools"] = body["tools"]
    return found


def _is_free(choice: Any) -> bool:
    return (choice.get("type") if isinstance(choice, dict) else choice) in _FREE_CHOICES


def _check_grammars(body: Mapping[str, Any], most: int) -> None:
    for name, grammar in grammars_of(body).items():
        if _depth(grammar) > DEEPEST:
            raise errors.InvalidRequest(
                f"{name}: expected at most {DEEPEST} levels of lists and objects, got more; make it flatter",
                param=name,
            )
        if (size := len(json.dumps(grammar))) > most:
            raise errors.InvalidRequest(
                f"{name} has {size} bytes, but at most {most} bytes may be compiled; make it smaller",
                param=name,
            )
        try:
            check_grammar(grammar)
        except ValueError as e:
            raise errors.InvalidRequest(
                f"{name} would take too long to compile: {e}; make it simpler", param=name
            ) from e


def _check_prompt_logprobs(body: Mapping[str, Any], body_bytes: int, most: int) -> None:
    """Bound a request's prompt log-probabilities. An engine's server makes an object for each of them, for
    all prompt tokens at once and for each of `n` answers; meanwhile it answers no other request."""
    name, each = _wanted_of_prompts(body)
    if each is None:
        return
    tokens = _prompt_tokens(body, body_bytes) * choices_of(body)
    if (asked := (each + 1) * tokens) > most:
        raise errors.InvalidRequest(
            f"{name} of {each} for about {tokens} prompt tokens asks for {asked} log-probabilities, "
            f"including each token's own, but at most {most} are allowed; shorten the prompt or lower {name}",
            param=name,
        )


def _wanted_of_prompts(body: Mapping[str, Any]) -> tuple[str, int | None]:
    """The field with the number of log-probabilities per prompt token, and the number; None: none. As vLLM
    reads it: with `echo`, a completion's `logprobs` apply to the prompt, too. For messages `top_logprobs`
    apply, 0 by default."""
    if body.get("prompt_logprobs") is not None or not body.get("echo"):
        return "prompt_logprobs", body.get("prompt_logprobs")
    if "messages" in body:
        return "top_logprobs", body.get("top_logprobs") or 0
    return "logprobs", body.get("logprobs")


def _prompt_tokens(body: Mapping[str, Any], body_bytes: int) -> int:
    """The tokens of all prompts. For messages, estimated from the whole body, because prompts contain
    tools and documents, too."""
    tokens = sum(_tokens(prompt) for prompt in prompts_of(body))
    return max(tokens, estimated_prompt(body_bytes)) if "messages" in body else tokens


def _tokens(prompt: Any) -> int:
    """The tokens of a prompt: the length of a list of tokens; an estimate for a text."""
    if isinstance(prompt, list):
        return len(prompt)
    return estimated_prompt(len(prompt.encode(errors="surrogatepass"))) if isinstance(prompt, str) else 1


def _depth(value: Any) -> int:
    """Levels of lists and objects, as far as DEEPEST + 1."""
    depth, level = 0, [value]
    while depth <= DEEPEST and level:
        level = [each for each in level if isinstance(each, dict | list)]
        depth += bool(level)
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return depth
