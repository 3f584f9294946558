"""Convert an engine's error bodies to our errors with documented codes."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from controlplane import errors
from profiler.errors import CheckpointError

_TOO_LONG = ("maximum context length", "maximum model length", "max_model_len", "longer than the maximum")
# Part of vLLM's error for a model without a chat template, which quotes transformers.
NO_TEMPLATE = "you must provide a chat template"
GRAMMAR = "structured_outputs"  # workers' name for the field of a grammar, whichever field contained it
# vLLM's only message about a request that it gave up while the engine continues. If the request has a
# grammar, the grammar usually could not be compiled, or no token follows it; workers explain other causes.
GIVEN_UP = "Internal server error"


class _Reported(NamedTuple):
    """An error as an engine reports it."""

    message: str
    param: str | None
    code: Any


def from_engine(status: int, body: bytes, grammar: str = "") -> errors.OstinatoError:
    """The error of a reply that is not 2xx. Client mistakes stay 400s; all others are the engine's.

    `grammar` is the request's field that restricts its answer, if it has one.
    """
    message, param, code = _reported(body)
    for refusal in (errors.AdapterMismatch, errors.SourceUnreadable):
        if code == refusal.code:
            return refusal(message)
    if status in (400, 422) and any(hint in message for hint in _TOO_LONG):
        return errors.PromptTooLong(message, param=param or "messages")
    if 400 <= status < 500 and NO_TEMPLATE in message:
        return errors.NoChatTemplate(
            "the model has no chat template, so it takes no messages; send the text to POST /v1/completions, "
            "or put chat_template.jinja into the model's or variant's folder and register it again",
            param="messages",
        )
    if 400 <= status < 500:
        return errors.InvalidRequest(message, param=grammar if grammar and param == GRAMMAR else param)
    return _not_answered(status, message, grammar)


def _not_answered(status: int, message: str, grammar: str) -> errors.OstinatoError:
    if grammar and status == 500 and message == GIVEN_UP:
        return errors.InvalidRequest(
            f"the engine gave the request up, most likely because {grammar} is invalid, allows no token, or "
            "is too slow; use a grammar that the model's vocabulary can follow, without repetitions within"
            " repetitions",
            param=grammar,
        )
    if status == 503:
        return errors.Unavailable(message, retry_after_s=5)
    return errors.EngineFailed(message)


def refused(error: ValueError) -> errors.OstinatoError:
    """The error of an engine's refusal to load a variant: its files are not sound, or it does not fit."""
    if isinstance(error, CheckpointError):
        return errors.SourceUnreadable(str(error), param="adapter")
    return errors.AdapterMismatch(str(error), param="adapter")


def from_engine_event(event: bytes, grammar: str = "") -> errors.OstinatoError:
    """As `from_engine`, for an error event inside a stream, whose status is its `code`."""
    body = event.removeprefix(b"data: ").partition(b"\n")[0]
    code = _reported(body).code
    return from_engine(code if isinstance(code, int) else 500, body, grammar)


def _reported(body: bytes) -> _Reported:
    """The error in an OpenAI-style body; as its message the start of any other body."""
    try:
        error = json.loads(body)
        error = error.get("error", error)
        return _Reported(str(error["message"]), error.get("param"), error.get("code"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return _Reported(f"the engine refused the request: {body[:200].decode(errors='replace')}", None, None)
