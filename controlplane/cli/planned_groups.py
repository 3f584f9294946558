"""The sizes of a scenario's engines, chosen as `ostinato plan` and a deployment choose them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from controlplane.planning.what_if import what_if
from controlplane.settings import Settings
from controlplane.simulation.forms import EstimateForm, GroupsForm, ScenarioForm, VariantsForm
from placement.solver.gpu_types import KNOWN, MEMORY_GIB
from placement.solver.outcome import NotPlaced
from placement.solver.schema import ScenarioError, read_form
from placement.types import Placement
from profiler.variants.types import VariantKind

MAX_REGISTERED = 1000  # of each kind: more variants change no size


def with_chosen_sizes(
    form: ScenarioForm, folder: Path, settings: Settings
) -> tuple[ScenarioForm, list[dict[str, Any]]]:
    """The scenario with the sizes that its groups leave out, and each choice with its reason.

    Raises ScenarioError when an engine does not fit into the memory of its GPUs.
    """
    made, chosen = list[GroupsForm](), list[dict[str, Any]]()
    for number, groups in enumerate(form.cluster.groups):
        if groups.kv_tokens is not None or groups.estimate is None:
            made.append(groups)
            continue
        placement = _placement(form, number, groups, groups.estimate, folder, settings)
        plan = placement.plan
        sizes = {"kv_tokens": plan.kv_cache_tokens, "max_rows": plan.sequences}
        sizes |= {"slots": plan.max_variants} if plan.max_variants else {}
        made.append(groups.model_copy(update=sizes))
        chosen.append(
            {
                "group": number,
                "kvTokens": plan.kv_cache_tokens,
                "maxRows": plan.sequences,
                "slots": made[-1].slots,
                "why": placement.choice.sizes,
            }
        )
    cluster = form.cluster.model_copy(update={"groups": tuple(made)})
    return form.model_copy(update={"cluster": cluster}), chosen


def _placement(
    form: ScenarioForm,
    number: int,
    groups: GroupsForm,
    estimate: EstimateForm,
    folder: Path,
    settings: Settings,
) -> Placement:
    where = f"cluster.groups.{number}.estimate"
    if estimate.gpu not in KNOWN:
        raise ScenarioError(f"{where}.gpu: expected one of {', '.join(sorted(KNOWN))}; got {estimate.gpu}")
    asked = read_form(_what_if_document(form, groups, estimate))
    ((_, outcome),) = what_if(asked, folder, settings).outcomes
    if isinstance(outcome, NotPlaced):
        raise ScenarioError(f"{where}: {outcome.reason}; give it more memoryGib, or give kvTokens")
    return outcome


def _what_if_document(form: ScenarioForm, groups: GroupsForm, estimate: EstimateForm) -> dict[str, Any]:
    """A file for `ostinato plan`: one engine of this group on the GPUs that its ranks need."""
    ranks = estimate.tensor_parallel * estimate.pipeline_parallel
    memory_gib = estimate.memory_gib or MEMORY_GIB[estimate.gpu]
    given = {
        "concurrency": groups.max_rows if "max_rows" in groups.model_fields_set else None,
        "slots": groups.slots if "slots" in groups.model_fields_set else None,
        "input_tokens": estimate.input_tokens,
        "output_tokens": estimate.output_tokens,
    }
    deployment = {
        "name": "engine",
        "model": {
            "config": str(estimate.config),
            "compressions": {estimate.quantization: {"accuracy": 1.0}},
        },
        "intent": estimate.intent,
        "rate_per_s": estimate.rate_per_s,
        "tp": [estimate.tensor_parallel],
        "pp": [estimate.pipeline_parallel],
        "variants": list(_registered(form.variants)),
        **{name: value for name, value in given.items() if value is not None},
    }
    gpus = [{"type": estimate.gpu, "count": ranks, "total_gib": memory_gib}]
    links = [list(range(ranks))] if ranks > 1 else []
    nodes = [{"name": "node", "gpus": gpus, "links": links}]
    return {"cluster": {"nodes": nodes}, "deployments": [deployment]}


def _registered(forms: tuple[VariantsForm, ...]) -> Iterator[dict[str, Any]]:
    for form in forms:
        count, ranks = min(form.count, MAX_REGISTERED), [*form.ranks] or [1]
        if form.kind is VariantKind.LORA:
            yield from ({"rank": rank, "count": max(1, count // len(ranks))} for rank in ranks)
        else:
            mib = form.mib + form.mib_per_rank * max(ranks)
            yield {"kind": form.kind, "mib": max(mib, 1e-3), "count": count}
