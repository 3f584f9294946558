"""What the variants in a batch add to the time of a hidden layer: bytes that are read, and operations.

A layer of the base is read once for all rows; each distinct variant is read once for its own. LoRA kernels
that pad all rows to the largest rank take `alpha rows max(rank)`, those that do not `alpha sum(rank)`
(CaraServe, section 5): ours do not, so the sum is the figure and the maximum its upper end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from profiler.physical.calibration import Calibration, Cut
from profiler.shards import active_shard_elements, layer_shard_bytes
from profiler.types import ModelSpec, adaptable_linears
from profiler.variants.types import ModuleFacts, VariantKind, VariantSpec

SPARSE_SHARE = 0.5  # of a sparse delta's numbers are stored (2:4), and multiplied with


@dataclass(frozen=True)
class VariantLoad:
    """Of one hidden layer, unsharded, summed over the rows (requests) of one batch.

    `rank_sum` and `rank_max` are of LoRA and low-rank deltas, over rows; `distinct_bytes` counts every
    variant once. `flops` is what one token of each row costs together, `padded_flops` the same with every
    low-rank row at the largest rank. `boft_blocks`: blocks of rotations that one token of each passes.
    """

    rows: int = 0
    rank_sum: int = 0
    rank_max: int = 0
    distinct_bytes: int = 0
    boft_blocks: int = 0
    flops: float = 0.0
    padded_flops: float = 0.0


def variant_load(spec: ModelSpec, mix: Sequence[VariantSpec | None], batch: int) -> VariantLoad:
    """The load of `batch` requests that ask the members of `mix` in turn; None is the base itself.

    Equal members are one variant. An empty mix is the base alone.
    """
    if not mix:
        return VariantLoad()
    rows = [mix[i % len(mix)] for i in range(min(batch, len(mix)))]
    counts = [batch // len(mix) + (i < batch % len(mix)) for i in range(len(rows))]
    present = [(one, count) for one, count in zip(rows, counts, strict=True) if one is not None]
    widest = max((one.max_rank for one, _ in present), default=0)
    distinct = [
        one for number, (one, _) in enumerate(present) if all(one is not o for o, _ in present[:number])
    ]
    return VariantLoad(
        rows=sum(count for _, count in present),
        rank_sum=sum(count * one.max_rank for one, count in present),
        rank_max=widest,
        distinct_bytes=sum(facts.size_bytes for one in distinct for facts in one.modules.values()),
        boft_blocks=sum(count * _blocks(spec, one) for one, count in present),
        flops=sum(count * _flops(spec, one, None) for one, count in present),
        padded_flops=sum(count * _flops(spec, one, widest) for one, count in present),
    )


@dataclass(frozen=True)
class VariantTime:
    """Seconds that a layer takes longer on each of its ranks; `padded_s` is the upper end."""

    added_s: float = 0.0
    padded_s: float = 0.0


def decode_time(calibration: Calibration, cut: Cut, load: VariantLoad) -> VariantTime:
    """Of a step in which each row decodes one token. Raises KeyError when the cut was not measured."""
    return _time(calibration, cut, load, 1.0)


def prefill_time(calibration: Calibration, cut: Cut, load: VariantLoad, tokens_per_row: float) -> VariantTime:
    """Of a step that fills `tokens_per_row` tokens of each row's prompt. Raises KeyError."""
    return _time(calibration, cut, load, tokens_per_row)


def _time(calibration: Calibration, cut: Cut, load: VariantLoad, tokens: float) -> VariantTime:
    """Reading and computing, at the pace at which the base's own layer was measured to read and compute."""
    if not load.rows:
        return VariantTime()
    tp = cut.tensor_parallel
    read_s = load.distinct_bytes / tp / _bytes_per_s(calibration, cut)
    pace = tokens / tp / _flops_per_s(calibration, cut)
    return VariantTime(read_s + load.flops * pace, read_s + load.padded_flops * pace)


def _bytes_per_s(calibration: Calibration, cut: Cut) -> float:
    """At the smallest batch a layer takes as long as reading it does."""
    decode = calibration.at(cut).decode
    layer_s = decode.layers_s(1, decode.layer.xs[0], 0.0)
    return layer_shard_bytes(calibration.spec, cut.tensor_parallel) / max(layer_s, 1e-9)


def _flops_per_s(calibration: Calibration, cut: Cut) -> float:
    """With the most prompt tokens a layer takes as long as computing it does."""
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
    """Of one token in one layer; low-rank modules count with `rank` if it is given."""
    total = 0.0
    for out, into, facts in _modules(spec, variant):
        match variant.kind:
            case VariantKind.LORA | VariantKind.SVD_DELTA:
                total += 2 * (facts.rank if rank is None else rank) * (out + into)
            case VariantKind.SPARSE_DELTA:
                total += 2 * SPARSE_SHARE * out * into
            case VariantKind.BOFT:  # each factor multiplies every feature with one block's row
                total += 2 * facts.factors * facts.block_size * into + out
    return total


def _blocks(spec: ModelSpec, variant: VariantSpec) -> int:
    """in / b of each factor of each module."""
    return sum(
        facts.factors * into // facts.block_size
        for _, into, facts in _modules(spec, variant)
        if facts.block_size
    )
