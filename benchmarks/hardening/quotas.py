"""A tenant asks two gateways for more than its quotas allow: requests a minute, and variants.

Each client makes a connection of its own for each request, so that the proxy spreads them over all gateways.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx

from benchmarks.hardening.kills import reporting_gateways
from benchmarks.live.groups import BASE, Running

OWN_KEY, TENANT_KEY = "the-installations-key", "the-tenants-key"
CLIENTS = 8
A_MINUTE, VARIANTS = 60, 3


def write_tenants(path: Path) -> Path:
    digest = sha256(TENANT_KEY.encode()).hexdigest()
    path.write_text(
        "tenants:\n"
        f"  - {{name: greedy, role: deployer, keys: ['{digest}'], requestsPerMinute: {A_MINUTE},"
        f" maxVariants: {VARIANTS}}}\n"
    )
    return path


def measure(running: Running, adapters: Sequence[Path], seconds: float) -> dict[str, Any]:
    told = reporting_gateways(running)
    began_s = time.monotonic()
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = [
            s
            for found in pool.map(lambda _: _asking(running, began_s, seconds), range(CLIENTS))
            for s in found
        ]
        took_s = time.monotonic() - began_s
        registered = Counter(pool.map(lambda n: _register(running, adapters, n), range(4 * VARIANTS)))
    return {
        "gateways": told,
        "requests_per_minute": A_MINUTE,
        "seconds": round(took_s, 1),
        "asked": dict(Counter(answers)),
        "allowed": A_MINUTE * (1 + took_s / 60),
        "max_variants": VARIANTS,
        "registered": dict(registered),
    }


def _asking(running: Running, began_s: float, seconds: float) -> list[int]:
    body = {"model": BASE, "prompt": "w1 w2", "max_tokens": 1}
    statuses = []
    while time.monotonic() - began_s < seconds:
        statuses.append(_post(running, "/v1/completions", body))
    return statuses


def _register(running: Running, adapters: Sequence[Path], number: int) -> int:
    where = str(adapters[number % len(adapters)])
    return _post(running, "/register_model", {"model": f"greedy{number}", "base": BASE, "adapter": where})


def _post(running: Running, path: str, body: dict[str, Any]) -> int:
    headers = {"authorization": f"Bearer {TENANT_KEY}"}
    url = running.cluster.url + path
    return httpx.post(url, json=body, headers=headers, timeout=60, trust_env=False).status_code
