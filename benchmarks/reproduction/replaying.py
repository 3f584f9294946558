"""The very requests of `benchmarks.serving` through the simulator, which makes a trace's file of them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.reproduction.deltazip import TRACES
from benchmarks.reproduction.traffic import TRACES as AZURE
from benchmarks.serving.workload import Request, azure_lengths, parse_case, synthetic, trace_requests
from controlplane.simulation.experiment import Case, Experiment
from controlplane.simulation.forms import ScenarioForm
from controlplane.simulation.world import World
from controlplane.traffic.request_terms import BYTES_PER_TOKEN

VARIANTS, MAX_MODEL_LEN, SEED = 32, 2048, 1


def requests_of(data: Path, name: str, seconds: float) -> list[Request]:
    """Of a case of `benchmarks.serving`; `data` holds the traces. Raises ValueError where it is none."""
    case = parse_case(name)
    if case.kind == "azure":
        return trace_requests((data / TRACES[case.rate]).read_text(), VARIANTS, MAX_MODEL_LEN)
    lengths = azure_lengths((data / AZURE["conversation"]).read_text(), MAX_MODEL_LEN)
    return synthetic(case, seconds, VARIANTS, lengths, SEED)


def replayed(asked: Sequence[Request], scenario: dict[str, Any]) -> World:
    """`scenario`: a scenario's file without its traffic."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "asked.jsonl").write_text("".join(map(_line, asked)))
        traffic = {"arrivals": "trace", "file": "asked.jsonl"}
        form = ScenarioForm.model_validate({**scenario, "traffic": traffic})
        world, _ = Experiment(form, Path(folder)).watched(Case("most-idle", None, 0, (1,)))
    return world


def _line(request: Request) -> str:
    """The trace's models are the variants; who asked the base asks one more variant."""
    fields = asdict(request)
    prompt = "x" * (BYTES_PER_TOKEN * fields["prompt_tokens"])
    model = f"delta-{fields['variant'] or VARIANTS}"
    entry = {"timestamp": fields["at_s"], "model": model, "prompt": prompt}
    return json.dumps(entry | {"max_tokens": fields["output_tokens"]}) + "\n"
