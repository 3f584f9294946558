"""The format of a worker's load for its gateways: a line of JSON for each `WorkerLoad`, on one long
answer.
"""

from __future__ import annotations

import json
import math
from typing import Any

from workers.messages import WorkerLoad
from workers.tiers import Tier

# A worker's HTTP server answers GET on this path with lines for as long as the gateway listens.
PATH = "/ostinato/load"
CONTENT_TYPE = "application/x-ndjson"
# At least one line comes every second. An older load does not describe the worker's current work.
STALE_S = 3.0

_encode = json.JSONEncoder(separators=(",", ":")).encode
_TIERS = frozenset(map(str, Tier))


def line_of(load: WorkerLoad) -> bytes:
    return _encode(vars(load)).encode() + b"\n"


def load_of(line: bytes) -> WorkerLoad:
    """The load in a line. Fields that this version does not know are ignored.

    Raises ValueError for an invalid line.
    """
    told = json.loads(line)  # its errors are ValueErrors
    if not isinstance(told, dict):
        raise _unexpected("an object", told)
    return WorkerLoad(
        ongoing=_count("ongoing", told.get("ongoing")),
        running=_count("running", told.get("running")),
        waiting=_count("waiting", told.get("waiting")),
        kv_usage=_number("kv_usage", told.get("kv_usage"), 1.0),
        steps=_count("steps", told.get("steps")),
        step_s=_number("step_s", told.get("step_s"), math.inf),
        prefill_tokens=_count("prefill_tokens", told.get("prefill_tokens")),
        prefill_s=_number("prefill_s", told.get("prefill_s"), math.inf),
        variants=_variants(told.get("variants")),
    )


def _variants(told: Any) -> tuple[tuple[int, str], ...]:
    if type(told) is not list or not all(map(_is_variant, told)):
        raise _unexpected("variants as [uid, tier]", told)
    return tuple((uid, tier) for uid, tier in told)


def _is_variant(told: Any) -> bool:
    if type(told) is not list or len(told) != 2:
        return False
    uid, tier = told
    return type(uid) is int and uid >= 0 and type(tier) is str and tier in _TIERS


def _count(name: str, value: Any) -> int:
    if type(value) is not int or value < 0:
        raise _unexpected(f"a count as {name}", value)
    return value


def _number(name: str, value: Any, most: float) -> float:
    if type(value) not in (int, float) or not (0.0 <= value <= most and value < math.inf):
        raise _unexpected(f"a number as {name}, 0 to {most}", value)
    return float(value)


def _unexpected(expected: str, value: Any) -> ValueError:
    return ValueError(f"invalid line of a worker's load: expected {expected}, got {str(value)[:80]!r}")
