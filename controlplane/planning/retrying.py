"""Whether a failed attempt is repeated, and when: bounded attempts, and pauses that grow. Pure.

The attempts so far are in the record of what is attempted, so a controller that was restarted continues to
count.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from controlplane import errors
from controlplane.state.records import Attempts

# Errors that may be over at the next attempt: an engine restarts, a connection broke, a queue was full.
PASSING = (
    errors.EngineFailed,
    errors.SourceUnreachable,
    errors.Unavailable,
    errors.TimedOut,
    errors.Cut,
    errors.Overloaded,
    errors.RateLimited,
    errors.StaleWrite,
)


@dataclass(frozen=True)
class RetryLimits:
    """At most `attempts`; the last one begins at most `total_s` after the first one failed."""

    attempts: int = 5
    first_pause_s: float = 2.0
    max_pause_s: float = 60.0
    total_s: float = 600.0


# The part of a pause that may be shortened by key, so that what failed together is not retried together.
SPREAD = 0.25

LOADING = RetryLimits()  # a variant into the engines of its base


def may_pass(error: BaseException) -> bool:
    """Whether another attempt may succeed. Errors of the request or of files are permanent."""
    return isinstance(error, PASSING) or not isinstance(error, errors.OstinatoError)


def pause_s(failures: int, limits: RetryLimits, key: str = "") -> float:
    """The pause between the `failures`-th failed attempt in a row and the next one.

    `key` names what is tried. Each key shortens the pause by another part of SPREAD, which differs after each
    failure but is the same for every caller. Without a key the pause has its full length.
    """
    whole_s = min(limits.max_pause_s, limits.first_pause_s * 2.0 ** min(max(0, failures - 1), 60))
    return whole_s * (1.0 - SPREAD * _share(f"{key} {failures}")) if key else whole_s


def _share(text: str) -> float:
    """A hash from 0 to below 1, uniform over texts."""
    return zlib.crc32(text.encode("utf-8", "surrogatepass")) / 2**32


def failed(
    attempts: Attempts, reason: str, now_s: float, limits: RetryLimits, key: str = ""
) -> Attempts | None:
    """The attempts after another failure, with the time of the next attempt; None: there is none."""
    after = counted(attempts, reason, now_s, limits, key)
    if after.failures >= limits.attempts or after.retry_at_s > after.since_s + limits.total_s:
        return None
    return after


def counted(attempts: Attempts, reason: str, now_s: float, limits: RetryLimits, key: str = "") -> Attempts:
    """The attempts after another failure, of something that is never given up: only the pauses of `limits`
    apply."""
    count = attempts.failures + 1
    since_s = attempts.since_s if attempts.failures else now_s
    return Attempts(count, since_s, now_s + pause_s(count, limits, key), reason)


def due(attempts: Attempts, now_s: float) -> bool:
    """Whether the next attempt may begin. A clock that was set back does not delay it."""
    return now_s >= attempts.retry_at_s or now_s < attempts.since_s


def describe(attempts: Attempts, limits: RetryLimits, key: str = "") -> str:
    """A sentence with the pause instead of the time, so that it stays true when it is read later."""
    pause = pause_s(attempts.failures, limits, key)
    return (
        f"attempt {attempts.failures} of {limits.attempts} failed ({attempts.reason}); "
        f"the next attempt begins after {round(pause, 1):g} s"
    )


def given_up(
    attempts: Attempts, error: errors.OstinatoError, now_s: float, advice: str
) -> errors.OstinatoError:
    """The final error: the number of attempts, the reason of the failure, and what to do."""
    count, since_s = attempts.failures + 1, attempts.since_s if attempts.failures else now_s
    message = (
        f"{count} attempts within {max(0.0, now_s - since_s):.0f} s failed; the last error: {cause(error)}"
    )
    return error.saying(f"{message.replace('; ', ', ')}; {advice}")


def cause(error: BaseException) -> str:
    """What happened, without the advice in the message."""
    text = error.message if isinstance(error, errors.OstinatoError) else f"{type(error).__name__}: {error}"
    return text.partition("; ")[0]
