"""Ranges of first tokens hold what was measured on an H200, and what was left out of the profile."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from profiler.architectures.registry import describe
from profiler.checkpoint import spec_of
from profiler.measurements import Measurement, SyntheticVariant, Timing, from_lines
from profiler.physical.calibrating import calibrate
from profiler.predicting.predict import Ground, Prediction, predict
from profiler.request_path import RequestPath
from profiler.types import DeviceRates, ModelSpec, Plan, Workload
from profiler.variants.synthetic import synthetic_spec
from testkit.known_models import LLAMA_7B_CONFIG

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
KINDS = ("lora", "sparse_delta")
LORA = tuple(SyntheticVariant("lora", rank=16, seed=seed) for seed in range(2))
DELTA = tuple(SyntheticVariant("sparse_delta", bits=4, seed=seed) for seed in range(4))
MIXES: dict[str, tuple[SyntheticVariant | None, ...]] = {  # as benchmarks.mixes asked them
    "base": (None,),
    "base, LoRA, delta": (None, LORA[0], DELTA[0]),
    "2 LoRAs, 4 deltas": (*LORA, *DELTA),
}
UNEQUAL = (
    SyntheticVariant("lora", rank=16),
    SyntheticVariant("sparse_delta", bits=2),
    SyntheticVariant("lora", rank=64),
    SyntheticVariant("sparse_delta", bits=4),
)
SHARE = 0.85


@cache
def measured() -> tuple[Measurement, ...]:
    return tuple(from_lines((RESULTS / "mixes_h200.jsonl").read_text().splitlines(), "a profile"))


@cache
def shape() -> ModelSpec:
    """Llama-2-7B's."""
    return spec_of(describe(LLAMA_7B_CONFIG, Path("config.json")), 2, "x")


def estimate(
    lines: tuple[Measurement, ...],
    load: Workload,
    mix: tuple[SyntheticVariant | None, ...],
    kinds: tuple[str, ...] = KINDS,
    path: RequestPath | None = None,
) -> Prediction:
    spec = shape()
    plan = Plan(1, (spec.num_layers,), "none", 2048, 0, 8, 64, batched_tokens=2048)
    ground = Ground(spec, (DeviceRates(1.0, 1.0),), calibrate(spec, lines), launched=kinds, path=path)
    members = [None if member is None else synthetic_spec(spec, member) for member in mix]
    return predict(ground, plan, load, members if any(members) else ())


def test_first_tokens_of_mixes_and_of_unequal_variants_are_inside() -> None:
    """The unequal ones were asked through a worker, whose request path was measured with them."""
    rows = json.loads((RESULTS / "mixes_h200.json").read_text())["rows"]
    bursts = [
        (estimate(measured(), Workload(row["batch"], row["input"], 64), MIXES[row["mix"]]), row["measured"])
        for row in rows
        if row["how"] == "burst" and row["what"] == "TTFT, ms"
    ]
    record = json.loads((RESULTS / "unequal_variants.json").read_text())
    path = RequestPath(**record["path"])
    unequal = [
        (
            estimate(measured(), Workload(seen["batch"], 64, 128), UNEQUAL, path=path),
            seen["mean_ttft_ms"],
        )
        for seen in record["together"]
    ]
    assert (len(bursts), len(unequal)) == (15, 3)
    inside = [found.ttft_s.holds(ttft_ms / 1e3) for found, ttft_ms in (*bursts, *unequal)]
    assert sum(inside) / len(inside) >= SHARE, inside
    assert all(inside[-3:]), "8, 32 and 64 clients of unequal variants"


@pytest.mark.slow
def test_held_back_measurements_are_inside_the_ranges() -> None:
    whole = [m for m in measured() if isinstance(m, Timing) and m.setting.layers_per_stage == (32,)]
    inside = []
    for one in whole:
        others = tuple(m for m in measured() if m is not one)
        load = Workload(one.point.batch, one.point.input_tokens, one.output_tokens)
        found = estimate(others, load, one.point.mix, one.setting.launched)
        inside.append(found.ttft_s.holds(one.ttft_s))
    assert len(inside) == 38
    assert sum(inside) / len(inside) >= SHARE, inside
