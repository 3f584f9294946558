"""Scenario documents, as in files, for a test to change."""

from __future__ import annotations

import copy
from typing import Any

_SMALL: dict[str, Any] = {
    "name": "small",
    "cluster": {
        "groups": [
            {
                "count": 2,
                "maxRows": 4,
                "batchedTokens": 256,
                "kvTokens": 1000,
                "slots": 2,
                "steps": {"baseMs": 20, "rowMs": 0.5, "kvTokenUs": 0.1, "promptTokenMs": 0.1, "rankUs": 5},
            }
        ]
    },
    "engine": {"variantLimit": 2, "hostGib": 0.05},
    "gateway": {"maxOngoing": 6, "places": 10},
    "variants": [
        {"kind": "lora", "count": 8, "ranks": [8, 64], "mibPerRank": 0.25},
        {"kind": "boft", "count": 2, "mib": 10, "variantMs": 1},
    ],
    "popularity": {"baseShare": 0.2, "drift": {"periodS": 2}},
    "traffic": {
        "ratePerS": 30,
        "promptTokens": {"kind": "uniform", "least": 10, "most": 200},
        "outputTokens": {"kind": "geometric", "mean": 10, "most": 100},
    },
    "classes": [
        {"name": "chat", "share": 2, "ttftMs": 400, "tpotMs": 60, "priority": "high", "tenant": "web"},
        {"name": "batch", "ttftMs": 2000, "priority": "low", "late": "drop"},
        {"name": "rest", "share": 0.5},
    ],
    "tenants": [{"name": "web", "weight": 2, "maxWaiting": 6}],
    "seeds": 2,
    "horizonS": 6,
    "warmUpS": 1,
}

# Two engines of eight rows that answer some 7 requests a second; twice as many come.
_OVERLOADED: dict[str, Any] = {
    "name": "overloaded",
    "cluster": {
        "groups": [
            {
                "count": 2,
                "maxRows": 8,
                "kvTokens": 100_000,
                "slots": 6,
                "steps": {"baseMs": 40, "rowMs": 4.5, "promptTokenMs": 0.6, "pathMs": 10},
            }
        ]
    },
    "gateway": {"maxOngoing": 8},
    "variants": [{"kind": "lora", "count": 6, "ranks": [8, 16, 64], "mib": 1}],
    "popularity": {"kind": "uniform", "baseShare": 0.3},
    "traffic": {
        "ratePerS": 14,
        "promptTokens": {"kind": "lognormal", "mean": 60, "cv": 0.7, "most": 300},
        "outputTokens": {"kind": "lognormal", "mean": 31, "cv": 0.6, "most": 64},
    },
    "classes": [
        {"name": "high", "share": 0.2, "ttftMs": 1000, "priority": "high"},
        {"name": "normal", "share": 0.4, "ttftMs": 4000, "priority": "normal"},
        {"name": "low", "share": 0.4, "ttftMs": 15000, "priority": "low", "late": "drop"},
    ],
    "seeds": 3,
    "horizonS": 240,
    "warmUpS": 20,
}


def overloaded() -> dict[str, Any]:
    """Twice the capacity, three priorities."""
    return copy.deepcopy(_OVERLOADED)


def small() -> dict[str, Any]:
    """Two groups and more than they can serve."""
    return copy.deepcopy(_SMALL)


def changed(path: str, value: Any) -> dict[str, Any]:
    """The document with the value at `a.b.0.c`."""
    document: Any = small()
    at = document
    *names, last = path.split(".")
    for name in names:
        at = at[int(name)] if name.isdigit() else at[name]
    at[last] = value
    return document  # type: ignore[no-any-return]
