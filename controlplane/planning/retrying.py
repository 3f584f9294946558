"""Whether something that failed is tried again, and when: bounded attempts, and pauses that grow. Pure.

The attempts so far are in the record of what is attempted: a controller that was restarted counts on.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from controlplane import errors
from controlplane.state.records import Attempts

# What may be over when it is tried again: an engine that restarts, a connection that broke, a full queue.
PASSING = (
    errors.EngineFailed,
    errors.Unavailable,
    errors.TimedOut,
    errors.Cut,
    errors.Overloaded,
    errors.RateLimited,
    errors.StaleWrite,
)


@dataclass(frozen=True)
class RetryLimits:
    """At most `attempts`, the last of which begins at most `total_s` after the first one failed."""

    attempts: int = 5
    first_pause_s: float = 2.0
    max_pause_s: float = 60.0
    total_s: float = 600.0


# Of a pause, which is as much shorter by key: what failed together is not tried again together.
SPREAD = 0.25

LOADING = RetryLimits()  # a variant into the engines of its base


def may_pass(error: BaseException) -> bool:
    """Whether another attempt may end otherwise. What is wrong with the request or with files stays so."""
    return isinstance(error, PASSING) or not isinstance(error, errors.OstinatoError)


def pause_s(failures: int, limits: RetryLimits, key: str = "") -> float:
    """Between the attempt that was the `failures`-th to fail in a row and the next one.

    `key` names what is tried: each has a share of SPREAD of its own, other after each failure, and always the
    same, whoever asks. Without one the pause is whole.
    """
    whole_s = min(limits.max_pause_s, limits.first_pause_s * 2.0 ** min(max(0, failures - 1), 60))
    return whole_s * (1.0 - SPREAD * _share(f"{key} {failures}")) if key else whole_s


def _share(text: str) -> float:
    """From 0 to below 1, evenly over texts."""
    return zlib.crc32(text.encode("utf-8", "surrogatepass")) / 2**32


def failed(
    attempts: Attempts, reason: str, now_s: float, limits: RetryLimits, key: str = ""
) -> Attempts | None:
    """The attempts once another one has failed, with the time of the next; None: there is no next one."""
    after = counted(attempts, reason, now_s, limits, key)
    if after.failures >= limits.attempts or after.retry_at_s > after.since_s + limits.total_s:
        return None
    return after


def counted(attempts: Attempts, reason: str, now_s: float, limits: RetryLimits, key: str = "") -> Attempts:
    """The attempts once another one has failed, of something that is never given up: only the pauses of
    `limits` hold."""
    count = attempts.failures + 1
    since_s = attempts.since_s if attempts.failures else now_s
    return Attempts(count, since_s, now_s + pause_s(count, limits, key), reason)


def due(attempts: Attempts, now_s: float) -> bool:
    """Whether the next attempt may begin. A clock that was set back does not put it off."""
    return now_s >= attempts.retry_at_s or now_s < attempts.since_s


def describe(attempts: Attempts, limits: RetryLimits, key: str = "") -> str:
    """Says the pause, not the time: the sentence stays true for whoever reads it later."""
    pause = pause_s(attempts.failures, limits, key)
    return (
        f"attempt {attempts.failures} of {limits.attempts} failed ({attempts.reason}); "
        f"the next one begins after {round(pause, 1):g} s"
    )


def given_up(
    attempts: Attempts, error: errors.OstinatoError, now_s: float, advice: str
) -> errors.OstinatoError:
    """The error that the last attempt ends with: how many there were, why it failed, and what to do."""
    count, since_s = attempts.failures + 1, attempts.since_s if attempts.failures else now_s
    message = (
        f"{count} attempts within {max(0.0, now_s - since_s):.0f} s failed; the last one: {cause(error)}"
    )
    return error.saying(f"{message.replace('; ', ', ')}; {advice}")


def cause(error: BaseException) -> str:
    """What happened, without what is to be done about it."""
    text = error.message if isinstance(error, errors.OstinatoError) else f"{type(error).__name__}: {error}"
    return text.partition("; ")[0]
