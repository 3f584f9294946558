"""The classes of requests in the overload: three priorities with targets of their own, from two tenants."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from benchmarks.live.arrivals import Share
from benchmarks.live.streaming import Outcome

FACTOR = 1.5  # targets of TPOT, over what answers took when all engines were busy


@dataclass(frozen=True)
class PriorityClass:
    """`share` of the requests. A late request is finished or dropped, by `late`."""

    name: str
    share: float
    ttft_s: float
    late: str = "finish"


CLASSES = (
    PriorityClass("high", 0.2, 1.0),
    PriorityClass("normal", 0.4, 4.0),
    PriorityClass("low", 0.4, 15.0, late="drop"),
)
# The second tenant sends three times the first one's requests.
TENANTS = {"small": 0.25, "large": 0.75}


def keys() -> dict[str, str]:
    """An API key for each tenant."""
    return {tenant: secrets.token_hex(16) for tenant in TENANTS}


def tenants_file(keys: Mapping[str, str]) -> str:
    """The contents of the file of `OSTINATO_TENANTS`: all tenants of one weight."""
    return json.dumps(
        {"tenants": [{"name": n, "keys": [sha256(key.encode()).hexdigest()]} for n, key in keys.items()]}
    )


def within(classes: Sequence[PriorityClass], longest_s: float) -> tuple[PriorityClass, ...]:
    """The same, and none waits longer for its first token."""
    return tuple(replace(one, ttft_s=min(one.ttft_s, longest_s)) for one in classes)


def parts(small: float | None, factor: float) -> dict[str, float]:
    """The share of each tenant in all requests; `small` is the small tenant's share of the capacity."""
    if small is None:
        return TENANTS
    return {"small": small / factor, "large": 1.0 - small / factor}


def shares(
    classes: Sequence[PriorityClass],
    tpot_s: float,
    keys: Mapping[str, str],
    tenants: Mapping[str, float] = TENANTS,
) -> tuple[Share, ...]:
    """Every class of every tenant, with its headers; `keys` are the tenants' API keys, if they have any."""
    return tuple(
        Share(one.share * part, one.name, tenant, _headers(one, tpot_s, keys.get(tenant, "")))
        for one in classes
        for tenant, part in tenants.items()
    )


def _headers(one: PriorityClass, tpot_s: float, key: str) -> tuple[tuple[str, str], ...]:
    own = (
        ("x-ostinato-priority", one.name),
        ("x-ostinato-ttft-ms", f"{1e3 * one.ttft_s:g}"),
        ("x-ostinato-tpot-ms", f"{1e3 * tpot_s:.3f}"),
        ("x-ostinato-late", one.late),
    )
    return (*own, ("authorization", f"Bearer {key}")) if key else own


def attained(outcome: Outcome, one: PriorityClass, tpot_s: float) -> tuple[bool, bool]:
    """Whether an answer came within its TTFT, and whether it came within its TPOT as well."""
    if outcome.code or outcome.ttft_s is None or outcome.ttft_s > one.ttft_s:
        return False, False
    return True, outcome.tpot_s is None or outcome.tpot_s <= tpot_s
