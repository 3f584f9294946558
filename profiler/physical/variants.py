"""What the variants in a batch add to the time of a hidden layer: launches, bytes to read, and operations.

A layer of the base is read once for all rows; each distinct variant is read once for its own rows. LoRA
kernels that pad all rows to the largest rank take `alpha rows max(rank)`; kernels that do not pad take `alpha
sum(rank)` (CaraServe, section 5). Our kernels do not pad, so the sum is the expected figure and the maximum
its upper end. The actual cost of each kind is measured with the fingerprint (`variant_costs`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

from profiler.physical.calibration import Calibration, Cut, KindsTogether, VariantCost, VariantCosts
from profiler.physical.prefill import PrefillSteps
from profiler.shards import active_shard_elements, layer_shard_bytes
from profiler.types import ModelSpec, adaptable_linears
from profiler.variants.types import ModuleFacts, VariantKind, VariantSpec

SPARSE_SHARE = 0.5  # of a sparse delta's numbers are stored (2:4) and used in multiplications
TILE_ROWS = 16  # rows of one variant that kernels process at once in steps that decode
FEW = 2  # variants that kernels read in parallel during the time of their launches
# Kinds that are not measured, and the kind whose costs are used instead.
STANDS_FOR = {VariantKind.SVD_DELTA: VariantKind.LORA}

Rows = Sequence[tuple[VariantSpec, int]]  # members of a mix, and the number of requests for each


@dataclass(frozen=True)
class KindLoad:
    """The variants of one kind, for one hidden layer, unsharded. Its kernels are launched for `modules`
    modules; there are `pairs` (module, distinct variant) pairs; `rows` requests use `distinct` variants. The
    rest is as in VariantLoad. Without pairs the kernels run but have no work."""

    kind: VariantKind
    modules: int
    pairs: int
    distinct_bytes: int
    flops: float
    padded_flops: float
    distinct: int = 1
    rows: int = 1


@dataclass(frozen=True)
class VariantLoad:
    """The load of variants on one hidden layer, unsharded, summed over the rows (requests) of one batch.

    `rank_sum` and `rank_max` cover LoRA and low-rank deltas, over rows; `distinct_bytes` counts every variant
    once. `flops` is the cost of one token of each row together, `padded_flops` the same with every low-rank
    row at the largest rank. `boft_blocks`: blocks of rotations that one token of each row passes. `batch` is
    the number of requests, including requests for the base; `members` is how many of the mix they use.
    """

    rows: int = 0
    rank_sum: int = 0
    rank_max: int = 0
    boft_blocks: int = 0
    kinds: tuple[KindLoad, ...] = ()
    batch: int = 1
    members: int = 1

    @property
    def distinct_bytes(self) -> int:
        return sum(kind.distinct_bytes for kind in self.kinds)

    @property
    def flops(self) -> float:
        return sum(kind.flops for kind in self.kinds)

    @property
    def padded_flops(self) -> float:
        return sum(kind.padded_flops for kind in self.kinds)

    @property
    def kind_names(self) -> frozenset[str]:
        return frozenset(kind.kind.value for kind in self.kinds)

    @property
    def is_of_several(self) -> bool:
        """Whether requests ask variants of several kinds."""
        return sum(kind.pairs > 0 for kind in self.kinds) > 1


@dataclass(frozen=True)
class Share:
    """The part of a batch in one step: its share of the batch's variants, its tokens per row (a mean over all
    rows), and its share of the rows. When a whole batch decodes, these are all variants, one token and all
    rows. `prompts` per row, if consecutive prompts use different members: each prompt is then a separate run
    of rows, otherwise all rows are one run."""

    present: float = 1.0
    tokens: float = 1.0
    rows: float = 1.0
    prompts: float = 0.0


WHOLE = Share()


def variant_load(
    spec: ModelSpec, mix: Sequence[VariantSpec | None], batch: int, launched: Collection[str] = ()
) -> VariantLoad:
    """The load of `batch` requests that use the members of `mix` in turn; None is the base itself.

    Equal members are one variant. An empty mix is the base alone. If any row has a variant, the kernels of
    the kinds in `launched` run for every module; kernels of other kinds run for modules that the batch's
    variants adapt.
    """
    if not mix:
        return VariantLoad()
    members = [mix[i % len(mix)] for i in range(min(batch, len(mix)))]
    counts = [batch // len(mix) + (i < batch % len(mix)) for i in range(len(members))]
    present = [
        (variant, count) for variant, count in zip(members, counts, strict=True) if variant is not None
    ]
    widest = max((variant.max_rank for variant, _ in present), default=0)
    kinds = dict.fromkeys(variant.kind for variant, _ in present)
    unused = [kind for kind in VariantKind if kind in launched and kind not in kinds] if kinds else []
    everywhere = len(adaptable_linears(spec))
    return VariantLoad(
        rows=sum(count for _, count in present),
        rank_sum=sum(count * variant.max_rank for variant, count in present),
        rank_max=widest,
        boft_blocks=sum(count * _blocks(spec, variant) for variant, count in present),
        kinds=tuple(
            _kind_load(
                spec,
                kind,
                [(variant, count) for variant, count in present if variant.kind is kind],
                widest,
                everywhere if kind in launched else 0,
            )
            for kind in (*kinds, *unused)
        ),
        batch=batch,
        members=len(members),
    )


def _kind_load(spec: ModelSpec, kind: VariantKind, rows: Rows, widest: int, least_modules: int) -> KindLoad:
    distinct = [
        variant for number, (variant, _) in enumerate(rows) if all(variant is not o for o, _ in rows[:number])
    ]
    return KindLoad(
        kind,
        modules=max(least_modules, len({name for variant in distinct for name in variant.modules})),
        pairs=sum(len(variant.modules) for variant in distinct),
        distinct_bytes=sum(facts.size_bytes for variant in distinct for facts in variant.modules.values()),
        flops=sum(count * _flops(spec, variant, None) for variant, count in rows),
        padded_flops=sum(count * _flops(spec, variant, widest) for variant, count in rows),
        distinct=len(distinct),
        rows=sum(count for _, count in rows),
    )


def decode_share(load: VariantLoad, sequences: float) -> Share:
    """The share in a step in which `sequences` of the batch's requests decode."""
    rows = min(1.0, sequences / load.batch)
    return Share(min(1.0, sequences / load.members), rows, rows)


def prefill_share(load: VariantLoad, step: PrefillSteps, input_tokens: int) -> Share:
    """The share in a step that fills prompts, including the requests that decode in it."""
    prompts = min(load.batch, step.tokens / input_tokens + (step.tokens % input_tokens > 0))
    return Share(
        min(1.0, (prompts + step.decoding) / load.members),
        (step.tokens + step.decoding) / load.batch,
        0.0,
        prompts / load.batch if load.members > 1 else 0.0,
    )


@dataclass(frozen=True)
class VariantTime:
    """Seconds that variants add to a layer on each of its ranks; `padded_s` is the upper end. `is_measured`:
    the costs of every kind were measured."""

    added_s: float = 0.0
    padded_s: float = 0.0
    is_measured: bool = True


def decode_time(
    calibration: Calibration, cut: Cut, load: VariantLoad, sequences: float | None = None
) -> VariantTime:
    """The added time of a step in which each row decodes one token, or `sequences` of the rows do. Raises
    KeyError when the cut was not measured."""
    share = WHOLE if sequences is None else decode_share(load, sequences)
    return _time(calibration, cut, load, share, prefill=False)


def prefill_time(calibration: Calibration, cut: Cut, load: VariantLoad, share: Share) -> VariantTime:
    """The added time of a step that fills prompts (`prefill_share`). Raises KeyError."""
    return _time(calibration, cut, load, share, prefill=True)


def _time(
    calibration: Calibration, cut: Cut, load: VariantLoad, share: Share, *, prefill: bool
) -> VariantTime:
    added = padded = 0.0
    known = True
    for of_kind in load.kinds:
        costs = costs_of(calibration, of_kind.kind)
        cost = VariantCost() if costs is None else costs.prefill if prefill else costs.decode
        more = of_kind.padded_flops / of_kind.flops if of_kind.flops else 1.0
        added += kind_s(calibration, cut, of_kind, cost, share)
        padded += kind_s(calibration, cut, of_kind, cost, share, more)
        known = known and costs is not None
    together = together_of(calibration, load)
    factor = together.prefill if prefill else together.decode
    return VariantTime(factor * added, factor * padded, known)


def costs_of(calibration: Calibration, kind: VariantKind) -> VariantCosts | None:
    return calibration.variants.get(kind) or calibration.variants.get(STANDS_FOR.get(kind, ""))


def together_of(calibration: Calibration, load: VariantLoad) -> KindsTogether:
    """The factors for these kinds together; for kinds that were not measured in one batch, times add up."""
    known = calibration.together.get(load.kind_names) if load.is_of_several else None
    return known or KindsTogether()


def kind_s(
    calibration: Calibration,
    cut: Cut,
    load: KindLoad,
    cost: VariantCost,
    share: Share = WHOLE,
    padding: float = 1.0,
) -> float:
    """What one kind adds to a layer, with `padding` times its operations."""
    modules, pairs, work_s, more_s, tiles = parts_of(calibration, cut, load, share, padding)
    launches_s = cost.per_module_s * modules + cost.per_pair_s * pairs
    return launches_s + cost.pace * work_s + cost.more_pace * more_s + cost.per_tile_s * tiles


def parts_of(
    calibration: Calibration, cut: Cut, load: KindLoad, share: Share, padding: float = 1.0
) -> tuple[float, float, float, float, float]:
    """The amounts for the figures of `VariantCost`: modules, pairs, seconds of work, seconds of reading all
    variants except FEW, and tiles beyond each variant's first, or runs of rows beyond the kind's first."""
    read_s, compute_s = work_s(calibration, cut, load, share.tokens)
    read_s *= share.present
    pairs = load.pairs * share.present
    distinct = load.distinct * share.present
    more_s = read_s * max(0.0, 1.0 - FEW / distinct) if distinct else 0.0
    tiles = max(0.0, load.rows * share.rows / (TILE_ROWS * distinct) - 1.0) if distinct else 0.0
    runs = max(0.0, load.rows * share.prompts - 1.0) if distinct else 0.0
    return load.modules, pairs, read_s + compute_s * padding, more_s, pairs * tiles + load.modules * runs


def work_s(calibration: Calibration, cut: Cut, load: KindLoad, tokens: float) -> tuple[float, float]:
    """Seconds of reading and of computing, at the pace that was measured for the base's own layer."""
    read_s = load.distinct_bytes / cut.tensor_parallel / _bytes_per_s(calibration, cut)
    return read_s, load.flops * tokens / cut.tensor_parallel / _flops_per_s(calibration, cut)


def _bytes_per_s(calibration: Calibration, cut: Cut) -> float:
    """The pace of reading: at the smallest batch, reading a layer takes all of its time."""
    decode = calibration.at(cut).decode
    layer_s = decode.layers_s(1, decode.layer.xs[0], 0.0)
    return layer_shard_bytes(calibration.spec, cut.tensor_parallel, cut.quantization) / max(layer_s, 1e-9)


def _flops_per_s(calibration: Calibration, cut: Cut) -> float:
    """The pace of computing: with the most prompt tokens, computing a layer takes all of its time."""
    prefill = calibration.at(cut).prefill
    layer_s = prefill.layers_s(1, prefill.widest, 0.0)
    return (
        2 * active_shard_elements(calibration.spec, cut.tensor_parallel) * prefill.widest / max(layer_s, 1e-9)
    )


def _modules(spec: ModelSpec, variant: VariantSpec) -> Iterator[tuple[int, int, ModuleFacts]]:
    """(out, in) and facts of each adapted module of a layer."""
    linears = adaptable_linears(spec)
    for name, facts in variant.modules.items():
        if name in linears:
            yield linears[name].out, linears[name].into, facts


def _flops(spec: ModelSpec, variant: VariantSpec, rank: int | None) -> float:
    """Operations for one token in one layer; low-rank modules count with `rank` if it is given."""
    total = 0.0
    for out, into, facts in _modules(spec, variant):
        match variant.kind:
            case VariantKind.LORA | VariantKind.SVD_DELTA:
                total += 2 * (facts.rank if rank is None else rank) * (out + into)
            case VariantKind.SPARSE_DELTA:
                total += 2 * SPARSE_SHARE * out * into
            case VariantKind.BOFT:  # each factor multiplies every feature with one block's row
                total += 2 * facts.factors * facts.block_size * into + out
            case unknown:
                assert_never(unknown)
    return total


def _blocks(spec: ModelSpec, variant: VariantSpec) -> int:
    """The number of blocks: in / b for each factor of each module."""
    return sum(
        facts.factors * into // facts.block_size
        for _, into, facts in _modules(spec, variant)
        if facts.block_size
    )
