"""What is asked of the control plane: models of known shapes, requests, profiles; which even splits fit."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import time
from pathlib import Path
from typing import Any

from benchmarks.profiling import results, shapes
from benchmarks.profiling.tasks import Kind
from controlplane import errors
from controlplane.management.schemas.deploy import DeployModelRequest
from controlplane.planning import placement_decision
from controlplane.profiling import keys, progress
from controlplane.profiling.calibrations import ClusterMeasurements
from controlplane.settings import Settings
from controlplane.state.records import Model, ModelProfile, Phase
from controlplane.state.repository import State
from placement.types import CPU, Inventory
from profiler.measurements import to_line
from profiler.plans import even_stages
from profiler.shards import tp_fits

EVEN_TP, EVEN_PP, CPU_RANKS = (1, 2), (1, 2, 4), 2
TOKENIZER = ("tokenizer*", "vocab.json", "merges.txt", "special_tokens_map.json")


def write_model(folder: Path, shape: str, tokenizer: Path) -> Path:
    """Config and tokenizer; the engine makes the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in (path for pattern in TOKENIZER for path in tokenizer.glob(pattern)):
        shutil.copy(path, folder)
    (folder / "config.json").write_text(json.dumps(shapes.SHAPES[shape]))
    return folder


def named(models: str) -> dict[str, str]:
    """Shapes by the names of their models; one that is there already gets a number."""
    found: dict[str, str] = {}
    for shape in models.split(","):
        found[shape if shape not in found else f"{shape}-{len(found) + 1}"] = shape
    return found


def request_of(name: str, given: argparse.Namespace) -> DeployModelRequest:
    asked = dict(one.split("=", 1) for one in given.ask)
    load = {"inputTokens": given.input_tokens, "outputTokens": given.output_tokens}
    more = json.loads(asked.get(name, "{}"))
    return DeployModelRequest.model_validate({"model": name, "load": load, **more})


def profile_of(
    model: Model, shape: str, given: Path, seen: Inventory, settings: Settings
) -> ModelProfile | None:
    """As if the control plane had measured what the folder `given` has of this shape; None: nothing."""
    key = keys.key_of_model(model, seen, settings)
    assert key is not None
    found = [
        measurement
        for kind in (Kind.FINGERPRINTS, Kind.VARIANTS)
        if (path := results.merged(kind, given)).exists()
        for measurement in results.by_shape(path).get(shape, [])
    ]
    lines = tuple(
        to_line(m)
        for m in found
        if (m.setting.quantization, m.setting.batched_tokens) == ("none", settings.batched_tokens)
    )
    if not lines:
        return None
    return dataclasses.replace(
        progress.fresh_profile(key, time.time()), measurements=lines, phase=Phase.READY, points=len(lines)
    )


def even_splits(state: State, name: str, free: Inventory, settings: Settings) -> list[dict[str, Any]]:
    """Of each degree that the devices allow: whether `decide` would place the model split so."""
    model, deployment = state.models[name].record, state.deployments[name].record
    spec = keys.spec_of(model)
    most = sum(d.kind != CPU for d in free.devices) or CPU_RANKS
    others = placement_decision.exclude_group((d.record for d in state.deployments.values()), name)
    found = []
    for tp, pp in ((tp, pp) for tp in EVEN_TP for pp in EVEN_PP if tp * pp <= most and tp_fits(spec, tp)):
        constraints = dataclasses.replace(
            deployment.constraints,
            tensor_parallel=(tp,),
            pipeline_parallel=(),
            layers_per_stage=even_stages(spec.num_layers, pp),
        )
        asked = dataclasses.replace(deployment, constraints=constraints)
        fits, answer = True, "there is room"
        try:
            placement_decision.decide(
                model, asked, free, settings, (), ClusterMeasurements(state.profiles), others
            )
        except errors.NoFeasiblePlan as e:
            fits, answer = False, e.message
        layers = list(constraints.layers_per_stage)
        found.append({"tp": tp, "pp": pp, "layers_per_stage": layers, "fits": fits, "answer": answer})
    return found
