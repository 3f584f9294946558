"""Kills while a fine-tune is compressed and while an engine is replaced by another: what is left behind.

Each round registers a fine-tune to be compressed, kills a process at a random moment, and lets it be made, or
deletes it meanwhile. Then it has the base's engines placed again and kills a process while they take over. At
its end only what was there before the first round may be left.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from safetensors.torch import load_file, save_file

from benchmarks.hardening.kills import of_role, title_of
from benchmarks.hardening.probing import waiting_for
from benchmarks.live.groups import BASE, SERVING, Running
from controlplane.settings import Settings
from controlplane.state.repository import Repository, State
from controlplane.state.stores import open_store

TUNED = "made-of-a-tune"
SETTLED_S = 300.0
LATEST_S = 6.0  # after a change began something is killed
COMPRESSOR = "workers.compression"
OF_COMPRESSING = ("compressor", "controller", "agent", "gateway")
OF_REPLACING = ("engine", "controller", "agent", "gateway")


@dataclass(frozen=True)
class _Bench:
    running: Running
    repository: Repository
    tuned: Path
    artifacts: Path
    rng: random.Random

    def kill(self, role: str) -> bool:
        """Kill after a random while. False: no process was left to be killed by then."""
        if role == "compressor":
            waiting_for(lambda: bool(_compressors(self.running)), 10 * LATEST_S)
            time.sleep(self.rng.uniform(0.0, 1.0))
            found = _compressors(self.running)
        else:
            time.sleep(self.rng.uniform(0.0, LATEST_S))
            found = of_role(self.running, role)
        if not found:
            return False
        with suppress(psutil.NoSuchProcess):
            self.rng.choice(found).kill()
        return True

    def ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """The request is sent as by a client that retries while no server answers."""
        ends_s = time.monotonic() + SETTLED_S
        while True:
            with suppress(httpx.HTTPError):
                url, headers = self.running.cluster.url + path, self.running.headers
                reply = httpx.request(method, url, json=body, headers=headers, timeout=60, trust_env=False)
                if reply.status_code < 500:
                    return reply
            if time.monotonic() > ends_s:
                raise TimeoutError(f"{method} {path}: no answer within {SETTLED_S:.0f} s")
            time.sleep(0.2)

    def replaced(self) -> bool:
        """Whether all groups serve, and none is to be replaced."""
        groups = self.ask("GET", f"/deployments/{BASE}").json()["groups"]
        return len(groups) == self.running.served.groups and all(g["phase"] == SERVING for g in groups)


def measure(running: Running, store_url: str, folder: Path, rounds: int, seed: int) -> list[dict[str, Any]]:
    """A row for each round."""
    tuned = _write_tuned(folder)
    with closing(open_store(store_url)) as store:
        home = Path(running.cluster.home)
        artifacts = Settings(home=home, artifacts="").artifacts_folder
        bench = _Bench(running, Repository(store), tuned, artifacts, random.Random(seed))
        before = _there(bench)
        return [_round(bench, number, before) for number in range(rounds)]


def _round(bench: _Bench, number: int, before: Mapping[str, Any]) -> dict[str, Any]:
    compressing = OF_COMPRESSING[number // 2 % len(OF_COMPRESSING)]
    replacing = OF_REPLACING[number // 2 % len(OF_REPLACING)]
    was_killed = [_compress(bench, compressing, delete_early=number % 2 == 1)]
    began_s = time.monotonic()
    bench.ask("PATCH", f"/deployments/{BASE}", {"placeAnew": True}).raise_for_status()
    was_killed.append(bench.kill(replacing))
    waiting_for(bench.replaced, SETTLED_S, 0.5)
    settled_s = waiting_for(lambda: _there(bench) == before, SETTLED_S, 0.5)
    there = _there(bench)
    return {
        "killed": [role for role, was in zip((compressing, replacing), was_killed, strict=True) if was],
        "deleted_while_made": number % 2 == 1,
        "replaced_and_settled_s": None if settled_s is None else round(time.monotonic() - began_s, 1),
        "left": {}
        if there == before
        else {name: there[name] for name in there if there[name] != before[name]},
        "answers": _answers(bench),
    }


def _compress(bench: _Bench, role: str, delete_early: bool) -> bool:
    body = {
        "model": TUNED,
        "base": BASE,
        "source": str(bench.tuned),
        "compression": {"method": "magnitude", "bits": 4},
    }
    bench.ask("POST", "/register_model", body).raise_for_status()
    was_killed = bench.kill(role)

    def state() -> str:
        return str(bench.ask("GET", f"/models/{TUNED}").json().get("phase"))

    if not delete_early:
        waiting_for(lambda: state() in ("Ready", "Failed"), SETTLED_S, 0.5)
        assert state() == "Ready", bench.ask("GET", f"/models/{TUNED}").json()
    bench.ask("DELETE", f"/models/{TUNED}")
    gone: Callable[[], bool] = lambda: bench.ask("GET", f"/models/{TUNED}").status_code == 404  # noqa: E731
    while waiting_for(gone, 10.0, 0.5) is None:  # one that is being read is deleted once it may be
        bench.ask("DELETE", f"/models/{TUNED}")
    return was_killed


def _there(bench: _Bench) -> dict[str, Any]:
    """All that a round might leave."""
    state = bench.repository.read()
    return {
        "models": sorted(state.models),
        "groups": {name: len(d.record.groups) for name, d in state.deployments.items()},
        "open_operations": sum(not o.record.done for o in state.operations.values()),
        "reservations": _reserved(state),
        "artifacts": sorted(p.name for p in bench.artifacts.glob("*")),
        "compressors": len(_compressors(bench.running)),
        "engines": len(of_role(bench.running, "engine")),
    }


def _reserved(state: State) -> int:
    """How many ranks, of whomever."""
    return sum(len(ledger.record.reservations) for ledger in state.ledgers.values())


def _compressors(running: Running) -> list[psutil.Process]:
    return [process for process in running.processes() if COMPRESSOR in title_of(process)]


def _answers(bench: _Bench) -> dict[str, int]:
    """The status of each model's answer."""
    asked = {"prompt": "w1 w2", "max_tokens": 2}
    return {
        model: bench.ask("POST", "/v1/completions", {"model": model, **asked}).status_code
        for model in bench.running.models
    }


def _write_tuned(folder: Path) -> Path:
    """The base, of which one tensor in three was trained a little."""
    base = next(path.parent for path in sorted(folder.rglob("config.json")))
    tuned = folder / "tuned"
    shutil.copytree(base, tuned)
    for number, file in enumerate(sorted(tuned.glob("*.safetensors"))):
        tensors = load_file(file)
        for place, name in enumerate(sorted(tensors)):
            if (number + place) % 3 == 0:
                tensors[name] = tensors[name] * 1.01
        save_file(tensors, file, metadata={"format": "pt"})
    return tuned
