"""A model's figures from its checkpoint's config (`profiler.checkpoint.spec_of`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from placement.solver.request import Compression, ModelFigures
from profiler.plans import even_stages
from profiler.quantization import UNCOMPRESSED
from profiler.roofline import allowance_bytes, vocab_table_bytes
from profiler.shards import (
    active_shard_elements,
    cut_problem,
    head_is_embedding,
    layer_share,
    outer_bytes,
    tp_fits,
)
from profiler.types import ModelSpec, Plan

MAX_TP = 64


def figures_by_quantization(name: str, spec: ModelSpec, accuracies: Mapping[str, float]) -> ModelFigures:
    """A model in the engines' quantizations (`quantization_names`), with the accuracy of each. `spec` is the
    unquantized model as engines hold it. Estimates use the spec and the quantization's name, not these
    figures."""
    shares = {
        quantization: (accuracy, layer_share(spec, 1, quantization))
        for quantization, accuracy in accuracies.items()
    }
    figures = figures_of(name, spec, shares)
    quantizations = tuple(
        replace(compression, degrees=_degrees(spec, figures.degrees, compression.name))
        for compression in figures.compressions
    )
    return replace(figures, compressions=quantizations, spec=spec)


def _degrees(spec: ModelSpec, degrees: Sequence[int], quantization: str) -> tuple[int, ...]:
    return tuple(tp for tp in degrees if cut_problem(spec, tp, quantization) is None)


def figures_of(
    name: str, spec: ModelSpec, compressions: Mapping[str, tuple[float, float]] | None = None
) -> ModelFigures:
    """`compressions` by name: accuracy, and a layer's bytes as a share of the uncompressed layer's.

    The profiler's estimates know the uncompressed model only. For other quantizations these figures count,
    and the working memory is `profiler.roofline`'s allowance for an unsharded rank, an upper bound under
    TP."""
    quantizations = compressions or {UNCOMPRESSED: (1.0, 1.0)}
    as_it_is = set(quantizations) == {UNCOMPRESSED}
    tied, table = head_is_embedding(spec), vocab_table_bytes(spec, 1)
    plan = Plan(1, even_stages(spec.num_layers, min(2, spec.num_layers)), UNCOMPRESSED, 1, 0, 0, 0)
    overhead = allowance_bytes(spec, plan, 0)
    last = allowance_bytes(spec, plan, plan.pipeline_parallel - 1)
    return ModelFigures(
        name=name,
        layers=spec.num_layers,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        embedding_bytes=table,
        head_bytes=table,
        hidden_bytes=spec.hidden_size * spec.dtype_bytes,
        layer_flops=2.0 * active_shard_elements(spec, 1),
        overhead_bytes=overhead,
        compressions=tuple(
            Compression(
                quantization,
                accuracy,
                round(share * spec.layer_weight_bytes),
                spec.kv_bytes_per_token_per_layer,
            )
            for quantization, (accuracy, share) in quantizations.items()
        ),
        tied=tied,
        last_overhead_bytes=last - overhead + outer_bytes(spec),
        tables_everywhere=spec.tables_everywhere,
        spec=spec if as_it_is else None,
        degrees=tuple(tp for tp in range(1, min(spec.num_heads, MAX_TP) + 1) if tp_fits(spec, tp)),
    )
