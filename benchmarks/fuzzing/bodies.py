"""Hostile bodies to real engines (vLLM, SmolLM2's first layers, an adapter).

    python -m benchmarks.fuzzing.bodies --count 100000 --out benchmarks/results/fuzzing_bodies.json

A seed draws each body (testkit/fuzz/hostile_bodies.py) from vLLM's description of requests and the fields of
the other version that we support. The body passes the checks of a gateway, and goes to a worker. No body may
end with a 5xx, or bring a field that the table of fields does not name. Good bodies among them must be
answered. The engine must go on, and its processes may take at most MEMORY_BYTES more. Two other tenants send
requests all the time; their delays are compared with those before the first body.

`--engines` run at the same time, each with `--at-once` bodies. `--seconds` ends a part early. `--before` has
the result of an earlier part, which this part continues.
"""

from __future__ import annotations

import json
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import rehearsing
from benchmarks.fuzzing.engines import Asked, Engines, Result
from benchmarks.hardening.probing import ms
from profiler.types import CPU
from testkit.fuzz import hostile_bodies
from testkit.fuzz.hostile_bodies import Device, Found
from workers.bundled import smollm2
from workers.vllm_environment import vllm_version

AT_ONCE = 2
ALONE_S = 30.0
GPU_BYTES = 12 << 30  # of each engine on a GPU
SHOWN = 20
ENDLESS_S = 1e9


def main(argv: Sequence[str] | None = None) -> int:
    asked = _arguments(argv)
    command = rehearsing.command("benchmarks.fuzzing.bodies", argv)
    before = json.loads(asked.before.read_text()) if asked.before and asked.before.exists() else {}
    first = before.get("next_seed", asked.seed)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hostile-") as name:
        base = asked.base or _base(Path(name).resolve())
        engines = Engines(
            Asked(
                range(first, asked.seed + asked.count),
                base,
                _device(asked.device),
                asked.engines,
                asked.at_once,
                min(ALONE_S, asked.count / 100),
                time.time() + asked.seconds,
            )
        )
        part: dict[str, Any] = {}
        for results in engines.run():
            part = {"first_seed": first, "next_seed": engines.next_seed, **_part(results, began_s)}
            parts = [*before.get("parts", []), part]
            where = f"vLLM {vllm_version()} on {asked.device}, {rehearsing.machine()}"
            rehearsing.write_result(asked.out, _summary(command, where, parts))
            print(_line(part), flush=True)
    return 1 if part["broken"] else 0


def _arguments(argv: Sequence[str] | None) -> Namespace:
    parser = rehearsing.parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="bodies at once of each engine")
    parser.add_argument("--seconds", type=float, default=ENDLESS_S, help="no body is sent after them")
    parser.add_argument("--device", default=CPU, help="cpu, or the kind of GPU")
    parser.add_argument("--base", type=Path, help="the model's folder; without it SmolLM2's first layers")
    parser.add_argument("--before", type=Path, help="the result of the part before")
    return parser.parse_args(argv)


def _base(folder: Path) -> Path:
    smollm = smollm2.ensure(folder / "models", lambda line: None)
    return hostile_bodies.smollm2_layers(smollm, folder)


def _device(kind: str) -> Device:
    return hostile_bodies.ON_CPU if kind == CPU else Device(kind, GPU_BYTES)


def _part(results: Mapping[int, Result], began_s: float) -> dict[str, Any]:
    """What the engines of one part have shown."""
    total = Found()
    for result in results.values():
        total.add(result.found)
    return {
        "bodies": total.codes.total() + sum(each["seed"] >= 0 for each in total.broken),
        "codes": dict(total.codes.most_common()),
        "fields_that_passed": dict(sorted(total.passed.items())),
        "engines": [_engine(result.found) for _, result in sorted(results.items())],
        "others_alone": ms(total.alone_s),
        "others_beside": ms(total.beside_s),
        "broken": len(total.broken),
        "first_broken": total.broken[:SHOWN],
        "slowest_s": round(total.slowest_s, 3),
        "slowest_seed": total.slowest_seed,
        "seconds": round(time.monotonic() - began_s, 1),
    }


def _engine(found: Found) -> dict[str, Any]:
    return {
        "bodies": found.codes.total(),
        "growth_mib": _mib(found.growth.own),
        "growth_mib_by_process": {role: _mib(size) for role, size in found.growth.by_process.items()},
        "mapped_files_mib": _mib(found.growth.files),
        "compiling_grammars_mib": _mib(found.growth.grammar_bytes),
        "others_alone": ms(found.alone_s),
        "others_beside": ms(found.beside_s),
    }


def _summary(command: str, where: str, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The result of all parts: sums, and the worst of each engine."""
    engines = [engine for part in parts for engine in part["engines"]]
    return {
        "command": command,
        "where": where,
        "first_seed": parts[0]["first_seed"],
        "next_seed": parts[-1]["next_seed"],
        "bodies": sum(part["bodies"] for part in parts),
        "codes": _sum(parts, "codes"),
        "fields_that_passed": dict(sorted(_sum(parts, "fields_that_passed").items())),
        "growth_mib": max(engine["growth_mib"] for engine in engines),
        "compiling_grammars_mib": max(engine["compiling_grammars_mib"] for engine in engines),
        "others_alone": parts[-1]["others_alone"],
        "others_beside": parts[-1]["others_beside"],
        "broken": sum(part["broken"] for part in parts),
        "first_broken": [each for part in parts for each in part["first_broken"]][:SHOWN],
        "seconds": round(sum(part["seconds"] for part in parts), 1),
        "parts": list(parts),
    }


def _sum(parts: Sequence[Mapping[str, Any]], name: str) -> dict[str, int]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part[name])
    return dict(total.most_common())


def _mib(size: int) -> float:
    return round(size / 2**20, 1)


def _line(part: Mapping[str, Any]) -> str:
    shown = ("bodies", "broken", "next_seed", "others_alone", "others_beside", "seconds")
    grown = [engine["growth_mib_by_process"] for engine in part["engines"]]
    return json.dumps({**{name: part[name] for name in shown}, "ok": part["codes"].get("ok"), "grown": grown})


def rehearse(folder: Path) -> None:
    """Three hundred bodies: it is also the test of the answers of a worker and a gateway."""
    out = folder / "bodies.json"
    assert main(["--out", str(out), "--count", "300"]) == 0, out.read_text()
    found = rehearsing.check(out, "bodies", "codes")
    assert min(found["codes"][code] for code in ("ok", "invalid_request")) > 0


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
