"""How much a tenant may ask in a minute: token buckets. Pure: of a bucket and the time comes the next bucket.

A bucket holds a minute's worth at most and is full at first, so in any window of t minutes no more goes
than (1 + t) times what is allowed in one, beside what was charged less than it was found to cost.
"""

from __future__ import annotations

from dataclasses import dataclass

MINUTE_S = 60.0


@dataclass(frozen=True)
class Bucket:
    """`level` may be taken at `at_s`. It is below 0 where more was used than had been taken for it."""

    level: float
    at_s: float


def full(per_minute: float, now_s: float) -> Bucket:
    return Bucket(per_minute, now_s)


def filled(bucket: Bucket, per_minute: float, now_s: float) -> Bucket:
    """The bucket as it is now. A clock that goes back fills nothing; a lowered limit holds at once."""
    passed_s = max(0.0, now_s - bucket.at_s)
    level = min(per_minute, bucket.level + per_minute * passed_s / MINUTE_S)
    return Bucket(level, max(now_s, bucket.at_s))


def take(bucket: Bucket, per_minute: float, amount: float, now_s: float) -> tuple[Bucket, float]:
    """The bucket after, and how many seconds to wait before trying again: 0, and then it was taken.

    What is larger than a whole bucket goes when that is full, and leaves less than nothing in it.
    """
    now = filled(bucket, per_minute, now_s)
    needed = min(amount, per_minute)
    if now.level >= needed:
        return Bucket(now.level - amount, now.at_s), 0.0
    return now, (needed - now.level) * MINUTE_S / per_minute


def settle(bucket: Bucket, per_minute: float, taken: float, used: float) -> Bucket:
    """The bucket once it is known how much was used of what had been taken."""
    return Bucket(min(per_minute, bucket.level + taken - used), bucket.at_s)
