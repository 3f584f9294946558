"""Which workers of a base may get requests, by what one gateway has seen of each. Pure.

A gateway looks at its workers at a steady pace, and all here is counted in looks: a gateway that did not run
for a while has not looked meanwhile, and takes nobody for silent.

- Silent: it told its load before, and for `quiet` looks in a row it has not. So is a process that hangs, and
  one behind a broken network. A worker that never tells its load (an older one) is never silent.
- Failing: `failures` requests in a row broke off or had no first byte in time. It rests for a while, the
  longer the more there were.
- Doubtful: as many answers in a row said that the engine failed. Each may be a request's own fault, and who
  sends such requests must not take an engine from others: the gateway asks it something harmless itself. If
  that fails, too, it is failing.

One that is silent or failing is ill. One that was ill is on trial, with one request at a time, until one is
answered. While none is well, those on trial get all; while all are ill, everybody does: that tells more of
the gateway, or of the machine, than of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto


class Standing(Enum):
    WELL = auto()
    ON_TRIAL = auto()
    ILL = auto()


class Takes(Enum):
    """Requests that a worker may be sent."""

    ALL = auto()
    ONE = auto()
    NONE = auto()


@dataclass(frozen=True)
class HealthRules:
    """`rest` is in looks, as `quiet`; it grows with every failure more, to `most_rests` times as long."""

    quiet: int = 6
    failures: int = 5
    rest: int = 10
    most_rests: int = 8


@dataclass(frozen=True, slots=True)
class Seen:
    """Of one worker. `quiet`: looks since it told its load; None: it never did. `rested`: looks since the
    last of the `failures` in a row. `is_proven`: it was never ill, or has answered since. `errors`: answers
    in a row that said that the engine failed."""

    quiet: int | None = None
    failures: int = 0
    rested: int = 0
    is_proven: bool = True
    errors: int = 0


def looked(seen: Seen, rules: HealthRules) -> Seen:
    """One look later."""
    quiet = None if seen.quiet is None else seen.quiet + 1
    later = replace(seen, quiet=quiet, rested=seen.rested + 1)
    return replace(later, is_proven=seen.is_proven and not is_silent(later, rules))


def told(seen: Seen) -> Seen:
    """Its load came."""
    return replace(seen, quiet=0)


def answered(seen: Seen) -> Seen:
    """A request had an answer, or the first of it."""
    return replace(seen, failures=0, errors=0, is_proven=True)


def failed(seen: Seen, rules: HealthRules) -> Seen:
    """A request broke off, or had nothing in time."""
    failures = seen.failures + 1
    return replace(seen, failures=failures, rested=0, is_proven=seen.is_proven and failures < rules.failures)


def erred(seen: Seen) -> Seen:
    """An answer said that the engine failed."""
    return replace(seen, errors=seen.errors + 1)


def is_doubtful(seen: Seen, rules: HealthRules) -> bool:
    """Whether it is to be asked something harmless; on trial one answer is enough for that."""
    return seen.errors >= (rules.failures if seen.is_proven else 1)


def asked(seen: Seen, rules: HealthRules, is_well: bool) -> Seen:
    """It was asked something harmless."""
    if is_well:
        return answered(seen)
    failures = max(seen.failures + 1, rules.failures)
    return replace(seen, failures=failures, errors=0, rested=0, is_proven=False)


def is_silent(seen: Seen, rules: HealthRules) -> bool:
    return seen.quiet is not None and seen.quiet >= rules.quiet


def standing(seen: Seen, rules: HealthRules) -> Standing:
    if is_silent(seen, rules):
        return Standing.ILL
    beyond = seen.failures - rules.failures
    if beyond >= 0 and seen.rested < rules.rest * min(rules.most_rests, beyond + 1):
        return Standing.ILL
    return Standing.WELL if seen.is_proven else Standing.ON_TRIAL


_OF_WELL = {Standing.WELL: Takes.ALL, Standing.ON_TRIAL: Takes.ONE, Standing.ILL: Takes.NONE}
_OF_TRIED = {Standing.ON_TRIAL: Takes.ALL, Standing.ILL: Takes.NONE}


def takes(standings: Sequence[Standing]) -> list[Takes]:
    """What each worker of a base may be sent; somebody always takes all, if there is anybody."""
    if Standing.WELL in standings:
        return [_OF_WELL[standing] for standing in standings]
    if Standing.ON_TRIAL in standings:
        return [_OF_TRIED[standing] for standing in standings]
    return [Takes.ALL for _ in standings]
