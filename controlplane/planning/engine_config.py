"""The engine configuration for a placement, which is what is launched. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from controlplane.planning.engine_sizes import MIN_HOST_BYTES
from controlplane.profiling.keys import engine_dtype, served_spec, spec_of
from controlplane.settings import Settings
from controlplane.state.records import Deployment, Model
from placement.types import CPU, Placement, Plan, RankPlacement
from profiler.chat_format import ChatFormat
from profiler.roofline import arena_bytes, has_merged_slot, kv_bytes_per_token
from profiler.types import ModelSpec
from profiler.variants.types import VariantKind, launched_kinds
from workers.messages import EngineConfig, RankConfig


def engine_config(
    model: Model,
    placement: Placement,
    settings: Settings,
    variants: Sequence[Model] = (),
    deployment: Deployment | None = None,
    group: str = "",
) -> EngineConfig:
    """Everything that a worker needs to start exactly this placement, for the base and its `variants`.

    `group` is the worker group's name in the cluster; by default its base's name.

    `deployment` says how many variants may run at once, and which parsers read answers. None: as many as the
    plan has slots for, and the parsers that suit the model.
    """
    limit = deployment.max_active_variants if deployment else None
    tools, reasoning = parsers_of(model, deployment)
    engine, _, tpot_s = settings.engine.partition(":")
    plan, kind = placement.plan, placement.ranks[0].device_kind
    dtype = engine_dtype(settings, kind)
    spec = served_spec(spec_of(model), dtype)
    return EngineConfig(
        engine=engine,
        name=model.name,
        group=group or model.name,
        model_path=model.path or "",
        dtype=dtype,
        quantization=plan.quantization,
        tensor_parallel=plan.tensor_parallel,
        ranks=tuple(_rank(spec, plan, rank) for rank in placement.ranks),
        max_model_len=plan.max_model_len,
        max_num_seqs=plan.sequences,
        max_variants=plan.max_variants,
        max_lora_rank=plan.max_lora_rank,
        variant_host_bytes=plan.variant_host_bytes or MIN_HOST_BYTES,
        variant_kinds=kinds_served(kind, variants),
        max_batched_tokens=plan.batched_tokens,
        roots=tuple(map(str, settings.roots)),
        max_active_variants=min(limit or 0, plan.max_variants),
        echo_tpot_s=float(tpot_s or 0),
        merged_slot=has_merged_slot(plan),
        tool_parser=tools,
        reasoning_parser=reasoning,
        needed_parsers=_asked_for(deployment),
        fingerprint=spec.fingerprint,
    )


def parsers_of(model: Model, deployment: Deployment | None) -> tuple[str, str]:
    """The parsers of tool calls and reasoning for a base's answers: as deployed, or from its `chat`."""
    chat = model.chat or ChatFormat()
    if deployment is None:
        return chat.tool_parser, chat.reasoning_parser
    tools, reasoning = deployment.tool_parser, deployment.reasoning_parser
    return (
        chat.tool_parser if tools is None else tools,
        chat.reasoning_parser if reasoning is None else reasoning,
    )


def _asked_for(deployment: Deployment | None) -> tuple[str, ...]:
    """The parsers that the deployment names explicitly."""
    if deployment is None:
        return ()
    return tuple(filter(None, (deployment.tool_parser, deployment.reasoning_parser)))


def _rank(spec: ModelSpec, plan: Plan, placed: RankPlacement) -> RankConfig:
    """The configuration of a rank. All ranks hold as many tokens as the one with the least room (vLLM's
    rule), so each rank gets memory for keys and values in proportion to its layers."""
    layers = placed.layer_end - placed.layer_start
    return RankConfig(
        layers=layers,
        memory_bytes=placed.memory_bytes,
        kv_cache_bytes=plan.kv_cache_tokens * kv_bytes_per_token(spec, plan.tensor_parallel) * layers,
        variant_memory_bytes=arena_bytes(spec, plan, placed.stage),
        node=placed.node,
        device_kind=placed.device_kind,
        device_index=placed.device_index,
    )


def kinds_served(device_kind: str, variants: Sequence[Model]) -> tuple[VariantKind, ...]:
    """The kinds of variants that an engine serves. On a GPU every kind adds launches to each captured
    graph."""
    if device_kind == CPU:
        return tuple(VariantKind)
    return launched_kinds({v.variant_spec.kind for v in variants if v.variant_spec})
