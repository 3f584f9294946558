"""A gateway that is asked hostile requests, and what becomes of it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from controlplane.api.request_limits import RequestLimits
from controlplane.settings import Settings
from controlplane.state.records import KINDS
from testkit import checkpoints
from testkit.api.installations import Installation, wait_for
from testkit.fuzz.hostile_folders import peak_memory
from testkit.fuzz.hostile_requests import Broken, Client, Drawer

MEMORY_BYTES = 256 << 20
REPAIRED = ("base", "v1")
REPAIR_EVERY = 500  # requests: what they deleted or undeployed is put back
CLIENTS = 12  # each waits for its answers: one alone would leave the gateway idle
OPTIONS: dict[str, Any] = {
    **{"request_timeout_s": 2, "max_body_bytes": 200_000},
    **{"engine": "echo", "max_model_len": 64},
}


@dataclass
class Found:
    """`statuses` of the answers, 0 where there was none; `broken` has seeds, routes, and what happened."""

    statuses: Counter[int] = field(default_factory=Counter)
    by_route: dict[str, Counter[int]] = field(default_factory=dict)
    broken: list[dict[str, Any]] = field(default_factory=list)
    slowest_s: float = 0.0
    slowest_seed: int = -1
    growth_bytes: int = 0

    def add(self, other: Found) -> None:
        self.statuses += other.statuses
        for route, statuses in other.by_route.items():
            self.by_route[route] = self.by_route.get(route, Counter()) + statuses
        self.broken += other.broken
        if other.slowest_s > self.slowest_s:
            self.slowest_s, self.slowest_seed = other.slowest_s, other.slowest_seed
        self.growth_bytes = max(self.growth_bytes, other.growth_bytes)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Installation]:
    """A gateway, a controller and echo engines, with models and broken ones to register."""
    files = folder.resolve() / "files"
    for name in ("base", "other", "torn"):
        checkpoints.write_model(files / name)
    (files / "torn/model.safetensors").write_bytes(b"\x08")
    checkpoints.write_adapter(files / "v1")
    checkpoints.write_adapter(files / "shape", {"r": 2})
    settings = Settings(home=folder / "home", allowed_roots=str(files), **OPTIONS)
    limits = RequestLimits(body_timeout_s=1, loading_timeout_s=1)
    with Installation(settings, files, limits=limits).running() as installation:
        repair(installation)
        yield installation


def repair(to: Installation) -> None:
    """Have a base and its variant registered and deployed."""
    wait_for(lambda: all(_is_ready(to, name) for name in REPAIRED))
    for name in REPAIRED:
        accepted = to.post("/deploy_model", {"model": name, "maxOutputLength": 32})
        if accepted.status_code == 202:
            to.end(accepted)


def _is_ready(to: Installation, name: str) -> bool:
    """Tell whether the model is ready now; register it if it was not. Meanwhile hostile requests continue,
    and may delete its base."""
    found = to.http.get(f"/models/{name}")
    if found.status_code == 404:
        path = str(to.files / name)
        where = {"source": path} if name == "base" else {"base": "base", "adapter": path}
        accepted = to.post("/register_model", {"model": name, **where})
        if accepted.status_code in (404, 409):  # its base is gone, or a hostile request registered the name
            return False
        to.end(accepted)
    return found.status_code == 200 and found.json()["phase"] == "Ready"


class Seeds:
    """Hands out seeds to several threads; at every REPAIR_EVERY-th one repairs what all of them broke."""

    def __init__(self, to: Installation, seeds: range) -> None:
        self._to, self._left = to, iter(seeds)
        self._drawing, self._repairing = threading.Lock(), threading.Lock()

    def __iter__(self) -> Iterator[int]:
        while True:
            with self._drawing:
                seed = next(self._left, None)
            if seed is None:
                return
            if seed % REPAIR_EVERY == 0:
                with self._repairing:
                    repair(self._to)
            yield seed


def ask(to: Installation, seeds: range, clients: int = CLIENTS) -> Found:
    """Send the requests of these seeds, several clients at once, and look at what is left of the gateway."""
    found, before = Found(), peak_memory()
    description, handed = to.app.openapi(), Seeds(to, seeds)
    with ThreadPoolExecutor(clients) as pool:
        for part in [pool.submit(_ask_alone, to, description, handed) for _ in range(clients)]:
            found.add(part.result())
    found.growth_bytes = peak_memory() - before
    _still_there(to, found, seeds)
    return found


def _ask_alone(to: Installation, description: dict[str, Any], seeds: Seeds) -> Found:
    """One after the other, over one connection while it lasts."""
    found, client, drawer = Found(), Client(to.url), Drawer(description, str(to.files))
    for seed in seeds:
        request = drawer.draw(seed)
        began_s = time.monotonic()
        try:
            status = client.send(request)
            found.statuses[status] += 1
            found.by_route.setdefault(request.what, Counter())[status] += 1
        except Broken as e:
            client.close()
            found.broken.append({"seed": seed, "route": request.what, "what": str(e)})
        if (took_s := time.monotonic() - began_s) > found.slowest_s:
            found.slowest_s, found.slowest_seed = took_s, seed
    client.close()
    return found


def _still_there(to: Installation, found: Found, seeds: range) -> None:
    """It answers, nothing is stuck in it, and it did not grow beyond what it may."""
    problems = []
    if to.http.get("/healthz").status_code != 200:
        problems.append("it does not answer any more")
    with contextlib.suppress(AssertionError):
        wait_for(lambda: to.in_flight() == 0, 30)
    if to.in_flight():
        problems.append(f"{to.in_flight():g} requests are under way for ever")
    if found.growth_bytes > MEMORY_BYTES:
        problems.append(f"the process grew by {found.growth_bytes >> 20} MiB")
    state = to.repository.read()
    problems += [
        f"a record of {kind.__name__} cannot be read" for kind in KINDS if state.any_unreadable(kind)
    ]
    if threading.active_count() > 200:
        problems.append(f"{threading.active_count()} threads are left")
    found.broken += [{"seed": seeds.stop, "route": "", "what": problem} for problem in problems]
