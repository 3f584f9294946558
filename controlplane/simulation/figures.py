"""A scenario's worker groups and variants as records: step models, what variants add, where they are.

Like all modules of this package that are not compiled, it does not import `profiler.compiled`: modules that
do are compiled again when they change.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from controlplane.routing.snapshot import ELSEWHERE, IN_HOST_MEMORY, IN_SLOT, Snapshot, new_snapshot
from controlplane.simulation import roofline_steps
from controlplane.simulation.forms import GroupsForm, ScenarioForm, StepsForm, VariantsForm
from profiler.step_time.records import (
    BASE_KIND,
    KIND_NUMBERS,
    MAX_ROWS,
    PREFILL_KNOTS,
    STEP_MODEL,
    VARIANT,
    rank_class,
)

MS, US, MIB, GB = 1e-3, 1e-6, 2**20, 1e9


def snapshot(form: ScenarioForm, folder: Path, ranks: npt.NDArray[np.int64], counts: list[int]) -> Snapshot:
    """Idle groups, `counts` of each entry of `cluster.groups`. `ranks` [V]: of the base (0) and all variants.

    Raises ScenarioError.
    """
    models = np.concatenate([model_of(groups, folder) for groups in form.cluster.groups]).view(np.recarray)
    made = new_snapshot(sum(counts), len(ranks), models)
    made.groups.model = np.repeat(np.arange(len(counts)), counts)
    for number, groups in enumerate(form.cluster.groups):
        made.variants[number] = variants_of(form.variants, groups, ranks)
    made.held.where = IN_HOST_MEMORY if form.engine.warm else ELSEWHERE
    made.held.where[0] = IN_SLOT
    return made


def draw_ranks(forms: tuple[VariantsForm, ...], rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """[V]: 0 for the base, then each variant's rank; 0 for a variant without a rank."""
    drawn = [np.zeros(1, np.int64)]
    for form in forms:
        weights = np.array([*form.ranks.values()] or [1.0])
        drawn.append(rng.choice([*form.ranks] or [0], form.count, p=weights / weights.sum()))
    return np.concatenate(drawn)


def model_of(groups: GroupsForm, folder: Path) -> Any:
    """[1]. Raises ScenarioError."""
    if groups.estimate is not None:
        model = roofline_steps.model_of(groups, folder)
    else:
        assert groups.steps is not None
        model = _explicit(groups.steps, groups.batched_tokens)
    model.batched_tokens, model.kv_tokens = groups.batched_tokens, groups.cache_tokens
    model.max_rows, model.slots = groups.max_rows, groups.slots
    return model


def _explicit(steps: StepsForm, batched_tokens: int) -> Any:
    model = _records(STEP_MODEL, 1)
    model.decode_s = MS * (steps.base_ms + steps.row_ms * np.arange(MAX_ROWS + 1))
    model.prefill_grain = batched_tokens / PREFILL_KNOTS
    start_ms = steps.base_ms if steps.prompt_base_ms is None else steps.prompt_base_ms
    tokens = np.arange(PREFILL_KNOTS + 1) * model.prefill_grain[0]
    model.prefill_s = MS * np.maximum(steps.base_ms, start_ms + steps.prompt_token_ms * tokens)
    model.context_s = US * steps.kv_token_us
    model.padded_s = US * steps.rank_us if steps.padded else 0.0
    model.any_s, model.path_s = MS * steps.any_variant_ms, MS * steps.path_ms
    for kind, launch_ms in steps.launch_ms.items():
        model.launch_s[0, KIND_NUMBERS[kind]] = MS * launch_ms
    return model


def variants_of(forms: tuple[VariantsForm, ...], groups: GroupsForm, ranks: npt.NDArray[np.int64]) -> Any:
    """[V], each variant's part in the steps of such groups; the first entry is the base."""
    made = _records(VARIANT, len(ranks))
    made.kind, made.weight, made.rank = BASE_KIND, 1.0, ranks
    made.rank_class = np.array([rank_class(rank) for rank in range(ranks.max() + 1)])[ranks]
    since = 1
    for form in forms:
        own = made[since : since + form.count]
        own.kind = KIND_NUMBERS[form.kind]
        own.bytes = MIB * (form.mib + form.mib_per_rank * own.rank)
        own.row_s, own.token_s = US * form.row_us, US * form.prompt_token_us
        if groups.steps is not None and not groups.steps.padded:
            own.row_s += US * groups.steps.rank_us * own.rank
        own.variant_s = MS * (form.variant_ms or 0.0)
        if groups.estimate is not None and form.variant_ms is None:
            own.variant_s = own.bytes / roofline_steps.read_bytes_per_s(groups.estimate)
        own.load_s = own.bytes / (GB * groups.load_gb_per_s)
        own.fetch_s = own.bytes / (GB * groups.fetch_gb_per_s)
        since += form.count
    return made


def _records(dtype: np.dtype[Any], count: int) -> Any:
    return np.zeros(count, dtype).view(np.recarray)
