"""All errors in Ostinato's answers.

OstinatoError
|- InvalidRequest 400          malformed or unknown fields, wrong types, unknown intent
|  |- PromptTooLong 400
|  |- NoChatTemplate 400       messages for a model that only completes text
|  `- SourceUnreadable 400     missing or corrupt checkpoint or adapter files
|     |- SourceNotFound 400    no such repository, revision, bucket or folder
|     |- SourceDenied 400      a source that refuses access
|     `- WrongDigest 400       fetched files that differ from what they should be
|- Unauthorized 401            a missing or wrong API key
|- Forbidden 403              the key's role or the model's owner does not allow the call
|- QuotaExceeded 403          a tenant has its most bases, variants, bytes or engines
|- HostNotAllowed 403         a browser's request under a name that is not this installation's
|- PathNotAllowed 403          a path outside the allowed roots
|- SourceNotAllowed 403        a source that this installation does not fetch from
|- ModelNotFound 404           no such model, deployment or operation
|  `- NotDeployed 404
|- AlreadyExists 409
|- InUse 409                   deleting what others depend on
|- NotReady 409                deploying what is still being registered
|- IdempotencyConflict 409     the same key with another request
|- StaleWrite 409              another request changed the record first
|- BodyTooSlow 408            the request's body did not arrive in time
|- BodyTooLarge 413
|- AdapterMismatch 422         an adapter that does not fit its base
|- LossTooLarge 422            no compression keeps the requested quality
|- NoFeasiblePlan 422          no plan meets the intent on this cluster
|- Overloaded 429               refused, or displaced in the queue: `details.reason` says why
|- RateLimited 429              a tenant exceeds its limit per minute
|- EngineFailed 502            the engine died or answered nonsense
|- ProfilingFailed 502         an architecture could not be measured
|- CompressionFailed 502       a fine-tune could not be compressed to a delta of its base
|- SourceUnreachable 502       a source does not answer, after many attempts
|- Unavailable 503             deploying, restarting, or the state store is unreachable
|- Late 504                     past its own target, after which it is dropped
|- Cut 504                      the engine said nothing for too long
|- TimedOut 504                longer than the installation's limit for a request
`- DiskBudgetTooSmall 507     fetched files have no room on a node

Codes and statuses are documented in docs/errors.md and are part of the API.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from controlplane.printable import printable


class OstinatoError(Exception):
    """The base of all errors. `message` says what was expected, what came and what to do."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    openai_type: ClassVar[str] = "api_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        details: dict[str, Any] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        message = _writable(message)
        super().__init__(message)
        self.message = message
        self.param = param
        self.details = details or {}
        self.retry_after_s = retry_after_s

    def saying(self, message: str) -> Self:
        """The same error with another message."""
        return type(self)(
            message, param=self.param, details=dict(self.details), retry_after_s=self.retry_after_s
        )

    def body(self) -> dict[str, Any]:
        """The OpenAI error object, used on every endpoint."""
        error = {"message": self.message, "type": self.openai_type, "param": self.param}
        return {"error": {**error, "code": self.code, **({"details": self.details} if self.details else {})}}


def _writable(text: str) -> str:
    """Text that UTF-8 can encode: names of files and JSON may have half surrogates, which records and
    answers cannot hold. It may quote untrusted files, so terminal control characters are escaped."""
    return printable(text.encode("utf-8", "backslashreplace").decode())


class InvalidRequest(OstinatoError):
    status, code, openai_type = 400, "invalid_request", "invalid_request_error"


class PromptTooLong(InvalidRequest):
    code = "context_length_exceeded"


class NoChatTemplate(InvalidRequest):
    code = "no_chat_template"


class SourceUnreadable(InvalidRequest):
    code = "source_unreadable"


class SourceNotFound(SourceUnreadable):
    code = "source_not_found"


class SourceDenied(SourceUnreadable):
    code = "source_denied"


class WrongDigest(SourceUnreadable):
    code = "wrong_digest"


class Unauthorized(OstinatoError):
    status, code, openai_type = 401, "unauthorized", "authentication_error"


class Forbidden(OstinatoError):
    status, code, openai_type = 403, "forbidden", "permission_error"


class QuotaExceeded(OstinatoError):
    status, code, openai_type = 403, "quota_exceeded", "permission_error"


class HostNotAllowed(OstinatoError):
    status, code, openai_type = 403, "host_not_allowed", "permission_error"


class PathNotAllowed(OstinatoError):
    status, code, openai_type = 403, "path_not_allowed", "permission_error"


class SourceNotAllowed(OstinatoError):
    status, code, openai_type = 403, "source_not_allowed", "permission_error"


class ModelNotFound(OstinatoError):
    status, code, openai_type = 404, "model_not_found", "invalid_request_error"


class NotDeployed(ModelNotFound):
    code = "not_deployed"


class OperationNotFound(ModelNotFound):
    code = "operation_not_found"


class AlreadyExists(OstinatoError):
    status, code, openai_type = 409, "already_exists", "invalid_request_error"


class InUse(OstinatoError):
    status, code, openai_type = 409, "in_use", "invalid_request_error"


class NotReady(OstinatoError):
    status, code, openai_type = 409, "not_ready", "invalid_request_error"


class IdempotencyConflict(OstinatoError):
    status, code, openai_type = 409, "idempotency_conflict", "invalid_request_error"


class StaleWrite(OstinatoError):
    status, code, openai_type = 409, "stale_write", "invalid_request_error"


class BodyTooSlow(OstinatoError):
    status, code, openai_type = 408, "body_too_slow", "invalid_request_error"


class BodyTooLarge(OstinatoError):
    status, code, openai_type = 413, "body_too_large", "invalid_request_error"


class AdapterMismatch(OstinatoError):
    status, code, openai_type = 422, "adapter_mismatch", "invalid_request_error"


class LossTooLarge(OstinatoError):
    status, code, openai_type = 422, "loss_too_large", "invalid_request_error"


class NoFeasiblePlan(OstinatoError):
    status, code, openai_type = 422, "no_feasible_plan", "invalid_request_error"


class Overloaded(OstinatoError):
    status, code, openai_type = 429, "overloaded", "rate_limit_error"


class RateLimited(OstinatoError):
    """The code is OpenAI's."""

    status, code, openai_type = 429, "rate_limit_exceeded", "rate_limit_error"


class EngineFailed(OstinatoError):
    status, code = 502, "engine_failed"


class ProfilingFailed(OstinatoError):
    status, code = 502, "profiling_failed"


class CompressionFailed(OstinatoError):
    status, code = 502, "compression_failed"


class SourceUnreachable(OstinatoError):
    status, code = 502, "source_unreachable"


class Unavailable(OstinatoError):
    status, code = 503, "unavailable"


class Late(OstinatoError):
    """The request is past its own target. A retry would be later still, so answers have `x-should-retry:
    false`, which OpenAI's clients know."""

    status, code = 504, "late"


class Cut(OstinatoError):
    status, code = 504, "cut"


class TimedOut(OstinatoError):
    status, code = 504, "timed_out"


class DiskBudgetTooSmall(OstinatoError):
    status, code = 507, "disk_budget_too_small"


def error_classes() -> dict[str, type[OstinatoError]]:
    """Every class above, by its code."""
    by_code: dict[str, type[OstinatoError]] = {}
    waiting: list[type[OstinatoError]] = [OstinatoError]
    while waiting:
        cls = waiting.pop()
        waiting.extend(c for c in cls.__subclasses__() if c.__module__ == __name__)
        by_code[cls.code] = cls
    return by_code


def error_from_body(body: Mapping[str, Any], retry_after_s: float | None = None) -> OstinatoError:
    """The exception for an OpenAI error object, with or without its envelope."""
    classes = error_classes()
    error = body.get("error", body)
    if not isinstance(error, Mapping):
        error = {"message": str(error)}
    code = str(error.get("code") or OstinatoError.code)
    details = error.get("details")
    kept = dict(details) if isinstance(details, Mapping) else {}
    if code not in classes:
        kept["code"] = code
    return classes.get(code, OstinatoError)(
        str(error.get("message") or code),
        param=error.get("param"),
        details=kept,
        retry_after_s=retry_after_s,
    )
