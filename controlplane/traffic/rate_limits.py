"""Requests and tokens that a tenant may use per minute: token buckets. Pure: (bucket, time) gives a new
bucket.

A bucket holds at most one minute's amount and is full at first. So in any window of t minutes at most (1 + t)
times the allowed amount per minute passes, plus amounts that were charged below their actual cost.
"""

from __future__ import annotations

from dataclasses import dataclass

MINUTE_S = 60.0


@dataclass(frozen=True)
class Bucket:
    """`level` may be taken at `at_s`. It is below 0 if more was used than had been taken."""

    level: float
    at_s: float


def full(per_minute: float, now_s: float) -> Bucket:
    return Bucket(per_minute, now_s)


def filled(bucket: Bucket, per_minute: float, now_s: float) -> Bucket:
    """The bucket at this time. A clock that goes back fills nothing; a lowered limit takes effect at once."""
    passed_s = max(0.0, now_s - bucket.at_s)
    level = min(per_minute, bucket.level + per_minute * passed_s / MINUTE_S)
    return Bucket(level, max(now_s, bucket.at_s))


def take(bucket: Bucket, per_minute: float, amount: float, now_s: float) -> tuple[Bucket, float]:
    """The bucket afterwards, and the seconds to wait before trying again; 0: the amount was taken.

    An amount larger than a whole bucket is taken when the bucket is full, and leaves a negative level.
    """
    now = filled(bucket, per_minute, now_s)
    needed = min(amount, per_minute)
    if now.level >= needed:
        return Bucket(now.level - amount, now.at_s), 0.0
    return now, (needed - now.level) * MINUTE_S / per_minute


def settle(bucket: Bucket, per_minute: float, taken: float, used: float) -> Bucket:
    """The bucket after it is known how much of the taken amount was used."""
    return Bucket(min(per_minute, bucket.level + taken - used), bucket.at_s)
