"""How near the simulation of DeltaZip's comparison is: the cases that were measured on H200s, simulated.

`benchmarks.serving` served 32 full fine-tunes of a Llama-2-7B as deltas and as whole models, on an H200 each
(`benchmarks/results/serving.json`). The same requests go through the simulator here, with that run's slots,
KV cache and rows. Who has no answer when a case is given up counts with the time until then, as there.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import rehearsing
from benchmarks.reproduction.deltazip import TRACES
from benchmarks.reproduction.deltazip_testbeds import VARIANTS, System, groups_of, h200, variants_of
from benchmarks.reproduction.sizes import Size
from benchmarks.reproduction.traffic import TRACES as AZURE
from benchmarks.serving.workload import Request, azure_lengths, parse_case, synthetic, trace_requests
from controlplane.simulation.experiment import Case, Experiment
from controlplane.simulation.forms import ScenarioForm
from controlplane.simulation.world import DONE, World
from controlplane.traffic.request_terms import BYTES_PER_TOKEN

# What that run was told (benchmarks.serving.settings).
SEED, SECONDS, DRAIN_S, MAX_MODEL_LEN, MAX_ROWS, KV_BYTES = 1, 15.0, 10.0, 2048, 64, 24 * 2**30
SYSTEMS = {"baseline": System("whole models", True, 7, False), "ours": System("deltas", False, 28, False)}
CASES = ("azure@0.5", "azure@1.0", "zipf@1", "uniform@1", "zipf@4", "uniform@4", "zipf@12", "uniform@12")
MEASURED = rehearsing.RESULTS / "serving.json"


def held_against_measurements(data: Path, size: Size) -> list[dict[str, Any]]:
    measured = {
        (row["engine"], row["case"]): row
        for row in json.loads(MEASURED.read_text())["rows"]
        if "requests" in row and row["limit"] == SYSTEMS[row["engine"]].slots
    }
    rows = []
    for case in CASES[: size.models]:
        asked = _requests(data, case)
        for engine, system in SYSTEMS.items():
            found = _simulated(asked, system)
            compared = {
                "simulated": found,
                "measured": {name: measured[engine, case][name] for name in found},
            }
            rows.append({"case": case, "engine": engine, "requests": len(asked)} | compared)
            print(*rows[-1].values(), flush=True)
    return rows


def _requests(data: Path, name: str) -> list[Request]:
    case = parse_case(name)
    if case.kind == "azure":
        return trace_requests((data / TRACES[case.rate]).read_text(), VARIANTS, MAX_MODEL_LEN)
    lengths = azure_lengths((data / AZURE["conversation"]).read_text(), MAX_MODEL_LEN)
    return synthetic(case, SECONDS, VARIANTS, lengths, SEED)


def _simulated(asked: list[Request], system: System) -> dict[str, float]:
    testbed = h200()
    groups = groups_of(testbed, system).model_copy(
        update={"kv_tokens": int(KV_BYTES / testbed.cached_bytes), "max_rows": MAX_ROWS}
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "asked.jsonl").write_text("".join(map(_line, asked)))
        form = ScenarioForm.model_validate(
            {
                "cluster": {"groups": [groups]},
                "gateway": {"max_ongoing": 10_000, "refuse": False},
                "variants": [variants_of(testbed, system)],
                "traffic": {"arrivals": "trace", "file": "asked.jsonl"},
                "policies": ["most-idle"],
                "horizon_s": 1e6,
            }
        )
        world, _ = Experiment(form, Path(folder)).watched(Case("most-idle", None, 0, (1,)))
    return _figures(world)


def _line(request: Request) -> str:
    """The trace's models are the variants; who asked the base asks one more variant."""
    fields = dataclasses.asdict(request)
    prompt = "x" * (BYTES_PER_TOKEN * fields["prompt_tokens"])
    model = f"delta-{fields['variant'] or VARIANTS}"
    entry = {"timestamp": fields["at_s"], "model": model, "prompt": prompt}
    return json.dumps(entry | {"max_tokens": fields["output_tokens"]}) + "\n"


def _figures(world: World) -> dict[str, float]:
    arrival_s, outcomes = world.asked.arrival_s, world.outcomes
    until_s = float(arrival_s[-1]) + DRAIN_S
    ended_s = np.where(outcomes.state == DONE, outcomes.end_s, math.inf)
    e2e_s = np.minimum(ended_s, until_s) - arrival_s
    ttft_s = np.minimum(outcomes.first_s, until_s) - arrival_s
    return {
        "e2e_mean_s": round(float(e2e_s.mean()), 4),
        "ttft_mean_s": round(float(ttft_s.mean()), 4),
        "unfinished": int((ended_s > until_s).sum()),
    }
