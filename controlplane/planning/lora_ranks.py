"""LoRA adapters of a larger rank than the engines of their base take. Pure."""

from __future__ import annotations

from dataclasses import replace

from controlplane import errors
from controlplane.planning import rebalancing
from controlplane.planning.engine_sizes import known_sizes
from controlplane.state.records import Deployment, Model
from controlplane.state.repository import State
from controlplane.state.worker_groups import GroupPhase, group_id_of, is_spare
from placement.types import EngineSizes
from profiler.variants.types import VariantKind


def exceeds(variant: Model, most: int | None) -> bool:
    """Whether the variant is an adapter of a larger rank. None: not chosen yet, so it suffices."""
    spec = variant.variant_spec
    return spec is not None and spec.kind is VariantKind.LORA and most is not None and spec.max_rank > most


def widens(state: State, name: str) -> bool:
    """Whether deploying this model needs new engines of its base."""
    variant = state.models.get(name)
    base = state.deployments.get(variant.record.base or "") if variant else None
    return variant is not None and base is not None and needs_new_engines(variant.record, base.record)


def needs_new_engines(variant: Model, base: Deployment) -> bool:
    """Whether the engines, present and to come, do not take the variant's rank."""
    if exceeds(variant, known_sizes(base).lora_rank):
        return True
    return bool(narrow_groups(variant, base)) and not any(is_spare(g, base.groups) for g in base.groups)


def largest_rank(variant: Model, base: Deployment) -> int | None:
    """The largest rank that all engines take."""
    known = known_sizes(base).lora_rank
    return min((*narrow_groups(variant, base).values(), *([] if known is None else [known])), default=None)


def narrow_groups(variant: Model, base: Deployment) -> dict[str, int]:
    """The largest rank of each group that serves and does not take the variant, by the group's id."""
    ranks = {
        group_id_of(base.model, group.number): group.placement.plan.max_lora_rank
        for group in base.groups
        if group.phase is GroupPhase.SERVING and group.placement is not None
    }
    return {group_id: most for group_id, most in ranks.items() if exceeds(variant, most)}


def mismatch(variant: Model, base_name: str, most: int | None, advice: str = "") -> str:
    """Why the engines of a base do not take the variant, and what to do."""
    rank = _rank(variant)
    advice = advice or (
        f"run `ostinato tune {base_name} --lora-rank {rank}`, which replaces the engines while the present "
        f"engines answer, then `ostinato deploy {variant.name}`"
    )
    return (
        f"'{variant.name}' has rank {rank}, but the engines of '{base_name}' take LoRA adapters up to rank "
        f"{most}; {advice}"
    )


def widened(variant: Model, base: Deployment) -> Deployment:
    """The base's deployment with new engines for the variant's rank, which take over once they serve. Their
    other sizes stay. If no engine serves, the next one takes the rank.

    Errors: InvalidRequest (the user asked for a smaller rank), NotReady (an engine is starting).
    """
    name, most = base.model, largest_rank(variant, base)
    if exceeds(variant, base.engine.lora_rank):
        raise errors.InvalidRequest(mismatch(variant, name, most), param="model")
    if starting := [group_id_of(name, g.number) for g in base.groups if g.phase is GroupPhase.STARTING]:
        advice = f"{', '.join(starting)} is starting; deploy '{variant.name}' again when it serves"
        raise errors.NotReady(mismatch(variant, name, most, advice), param="model")
    wider = replace(base, chosen=replace(base.chosen or EngineSizes(), lora_rank=None))
    if not base.serving_ids():
        return wider
    return rebalancing.renewed(wider, f"for LoRA adapters up to rank {_rank(variant)}")


def _rank(variant: Model) -> int:
    return variant.variant_spec.max_rank if variant.variant_spec else 0
