"""Workers of a base that may get requests, by one gateway's observations of each. Pure.

A gateway looks at its workers at a steady pace, and everything here is counted in looks. A gateway that did
not run for a while has not looked meanwhile, so it does not consider workers silent.

- Silent: the worker reported its load before, and for `quiet` looks in a row it has not. This also covers a
process that hangs and a broken network. A worker that never reports its load (an older one) is never silent.
- Failing: `failures` requests in a row broke off or had no first byte in time. The worker rests for a while,
which grows with the number of failures.
- Doubtful: as many answers in a row said that the engine failed.
Each may be a request's own fault, and a client with such requests must not take an engine from others: the
gateway sends a harmless probe itself. If the probe fails, too, the worker is failing.

A silent or failing worker is ill. A worker that was ill is on trial, with one request at a time, until one is
answered. While no worker is well, those on trial get all requests. While all are ill, every worker gets
requests: then the gateway or the machine is probably at fault.
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
    """The requests that a worker may get."""

    ALL = auto()
    ONE = auto()
    NONE = auto()


@dataclass(frozen=True)
class HealthRules:
    """`rest` is in looks, like `quiet`; it grows with every further failure, up to `most_rests` times."""

    quiet: int = 6
    failures: int = 5
    rest: int = 10
    most_rests: int = 8


@dataclass(frozen=True, slots=True)
class Seen:
    """Observations of one worker. `quiet`: looks since it reported its load; None: it never did. `rested`:
    looks since the last of the `failures` in a row. `is_proven`: it was never ill, or has answered since.
    `errors`: answers in a row that said that the engine failed."""

    quiet: int | None = None
    failures: int = 0
    rested: int = 0
    is_proven: bool = True
    errors: int = 0


def looked(seen: Seen, rules: HealthRules) -> Seen:
    """The observations one look later."""
    quiet = None if seen.quiet is None else seen.quiet + 1
    later = replace(seen, quiet=quiet, rested=seen.rested + 1)
    return replace(later, is_proven=seen.is_proven and not is_silent(later, rules))


def reported(seen: Seen) -> Seen:
    """The worker reported its load."""
    return replace(seen, quiet=0)


def answered(seen: Seen) -> Seen:
    """A request was answered, or its answer began."""
    return replace(seen, failures=0, errors=0, is_proven=True)


def failed(seen: Seen, rules: HealthRules) -> Seen:
    """A request broke off, or its answer did not begin in time."""
    failures = seen.failures + 1
    return replace(seen, failures=failures, rested=0, is_proven=seen.is_proven and failures < rules.failures)


def erred(seen: Seen) -> Seen:
    """An answer said that the engine failed."""
    return replace(seen, errors=seen.errors + 1)


def is_doubtful(seen: Seen, rules: HealthRules) -> bool:
    """Whether the worker needs a harmless probe; for a worker on trial one such answer is enough."""
    return seen.errors >= (rules.failures if seen.is_proven else 1)


def asked(seen: Seen, rules: HealthRules, is_well: bool) -> Seen:
    """The worker was probed."""
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
    """What each worker of a base may get; if there are workers, at least one takes all requests."""
    if Standing.WELL in standings:
        return [_OF_WELL[standing] for standing in standings]
    if Standing.ON_TRIAL in standings:
        return [_OF_TRIED[standing] for standing in standings]
    return [Takes.ALL for _ in standings]
