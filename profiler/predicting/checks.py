"""Checks of plans and loads that make no sense for a model. All raise PlanError, naming the field."""

from __future__ import annotations

from profiler.errors import PlanError
from profiler.plans import quantization_problem
from profiler.quantization import QUANTIZATIONS, SERVABLE
from profiler.shards import cut_problem
from profiler.types import ModelSpec, Plan, Workload

MAX_COUNT = 1_000_000  # of a batch, and of its tokens


def check_plan(spec: ModelSpec, plan: Plan, gpu: str = "") -> None:
    """Check a plan; `gpu` is the GPU's name if the plan runs on GPUs."""
    check_quantization(spec, plan.quantization, gpu)
    check_degree(spec, plan.tensor_parallel, plan.quantization)
    check_split(spec, plan)


def check_quantization(spec: ModelSpec, quantization: str, gpu: str = "") -> None:
    if quantization not in SERVABLE:
        raise PlanError(
            "quantization",
            f"expected one of {', '.join(sorted(SERVABLE))}, got {quantization!r}; other formats "
            "cannot be served",
        )
    if quantization in QUANTIZATIONS and (problem := quantization_problem(spec, quantization, gpu)):
        raise PlanError("quantization", f"{problem}; choose another quantization")


def check_degree(spec: ModelSpec, tensor_parallel: int, quantization: str) -> None:
    if problem := cut_problem(spec, tensor_parallel, quantization):
        raise PlanError("tensorParallel", f"{problem}; choose another degree of tensor parallelism")


def check_split(spec: ModelSpec, plan: Plan) -> None:
    layers = plan.layers_per_stage
    if not layers or min(layers) < 1 or sum(layers) != spec.num_layers:
        raise PlanError(
            "layersPerStage",
            f"expected stages of at least one layer that sum to {spec.num_layers}, "
            f"got {','.join(map(str, layers)) or 'none'} (sum {sum(layers)}); correct the layers",
        )


def check_load(spec: ModelSpec, workload: Workload) -> None:
    for name, count in (
        ("batch", workload.batch),
        ("inputTokens", workload.input_tokens),
        ("outputTokens", workload.output_tokens),
    ):
        if not 1 <= count <= MAX_COUNT:
            raise PlanError(name, f"expected {name} of 1 to {MAX_COUNT}, got {count}; correct {name}")
    length = workload.input_tokens + workload.output_tokens
    if length > spec.max_position:
        raise PlanError(
            "inputTokens",
            f"expected at most {spec.max_position} tokens of prompt and answer, the model's positions, got "
            f"{length}; shorten the prompt or the answer",
        )
