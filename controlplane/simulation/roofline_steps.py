"""Step models from a model's config alone: the profiler's roofline, at the rates of a GPU's data sheet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from controlplane.simulation.forms import EstimateForm, GroupsForm
from placement.solver.cluster import GpuType
from placement.solver.gpu_types import KNOWN
from placement.solver.schema import BF16_BYTES, ScenarioError
from profiler.architectures.registry import describe
from profiler.capabilities import gpu_problem
from profiler.checkpoint import declared_dtype_bytes, spec_of
from profiler.errors import CheckpointError, PlanError
from profiler.files import read_json
from profiler.plans import even_stages
from profiler.predicting.types import Ground
from profiler.step_time.sampling import step_model
from profiler.types import ModelSpec, Plan


def model_of(groups: GroupsForm, folder: Path) -> Any:
    """[1]. Raises ScenarioError."""
    form = groups.estimate
    assert form is not None
    rates = _gpu(form).rates(form.tensor_parallel)
    if problem := gpu_problem(form.quantization, form.gpu):
        raise ScenarioError(f"cluster.groups.estimate.quantization: {problem}; choose another quantization")
    try:
        spec = _spec(folder / form.config)
        plan = Plan(
            form.tensor_parallel,
            even_stages(spec.num_layers, form.pipeline_parallel),
            form.quantization,
            spec.max_position,
            groups.cache_tokens,
            groups.slots,
            0,
            batched_tokens=groups.batched_tokens,
        )
        return step_model(
            Ground(spec, (rates,) * plan.world_size), plan, max_rows=groups.max_rows, slots=groups.slots
        )
    except (CheckpointError, PlanError, OSError, ValueError) as error:
        raise ScenarioError(f"cluster.groups.estimate: {error}") from error


def read_bytes_per_s(form: EstimateForm) -> float:
    """The rate at which a group reads a variant's weights: all ranks read their parts at the same time."""
    return _gpu(form).rates(form.tensor_parallel).memory_bytes_per_s * form.tensor_parallel


def _spec(path: Path) -> ModelSpec:
    path = path / "config.json" if path.is_dir() else path
    raw = read_json(path)
    return spec_of(describe(raw, path), declared_dtype_bytes(raw, path) or BF16_BYTES)


def _gpu(form: EstimateForm) -> GpuType:
    if form.gpu not in KNOWN:
        raise ScenarioError(
            f"cluster.groups.estimate.gpu: expected one of {', '.join(sorted(KNOWN))}; got {form.gpu}"
        )
    return KNOWN[form.gpu]
