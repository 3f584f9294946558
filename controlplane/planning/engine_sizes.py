"""The sizes of a deployment's engines: what its user asked for, what was chosen before, and defaults. Pure.

The defaults suit the model, its registered variants and the kind of device. `placement.solver.sizing` chooses
context and requests at once within the range given here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from controlplane.profiling.usual_engine import of_kind, usual_engine
from controlplane.settings import Settings
from controlplane.state.records import Deployment, Model
from placement.solver.sizing import REQUEST_TOKENS, Bound, SizeRange
from placement.types import CPU, EngineSizes, Intent
from profiler.capabilities import compute_capability
from profiler.types import ModelSpec
from profiler.variants.types import VariantKind

MAX_SLOTS = 32  # the most slots that are chosen by default
MIN_HOST_BYTES = 2 << 30
HOST_MARGIN = 1.25  # over the registered variants' bytes
HOST_SHARE = 4
HOPPER = (9, 0)
ASKED, BEFORE = "as requested", "as chosen before"


def known_sizes(deployment: Deployment | None) -> EngineSizes:
    """The requested sizes, and the sizes chosen when the deployment was first placed."""
    return EngineSizes() if deployment is None else deployment.engine.or_else(deployment.chosen)


def size_range(
    deployment: Deployment, spec: ModelSpec, kind: str, settings: Settings, min_context: int = 1
) -> SizeRange:
    """The possible contexts and numbers of requests at once of its engines on such a device."""
    known = known_sizes(deployment)
    context = _context(deployment, spec, settings)
    requests = _requests(deployment, kind, settings)
    if known.cached_tokens is not None and context.fixed and requests.fixed:
        tokens = -(-known.cached_tokens // requests.most)
    else:
        tokens = min(_expected_tokens(deployment), context.most)
    return SizeRange(context, requests, tokens, min_context, grows=kind != CPU)


def max_context(deployment: Deployment, spec: ModelSpec, settings: Settings) -> int:
    return _context(deployment, spec, settings).most


def _context(deployment: Deployment, spec: ModelSpec, settings: Settings) -> Bound:
    if (asked := known_sizes(deployment).context_tokens) is not None:
        why = ASKED if deployment.engine.context_tokens is not None else BEFORE
        return Bound(min(asked, spec.max_position), why, fixed=True)
    if settings.max_model_len < spec.max_position:
        return Bound(settings.max_model_len, "the installation's limit")
    return Bound(spec.max_position, "the model's limit")


def _requests(deployment: Deployment, kind: str, settings: Settings) -> Bound:
    if (asked := known_sizes(deployment).requests_at_once) is not None:
        why = ASKED if deployment.engine.requests_at_once is not None else BEFORE
        return Bound(asked, why, fixed=True)
    most = usual_engine(kind, settings).max_requests
    limited = most < of_kind(kind).max_requests
    return Bound(most, "the installation's limit" if limited else "usual on such devices")


def _expected_tokens(deployment: Deployment) -> int:
    load = deployment.load
    if load.input_tokens is None or load.output_tokens is None:
        return max(REQUEST_TOKENS, (load.input_tokens or 0) + (load.output_tokens or 0))
    return load.input_tokens + load.output_tokens


def variant_sizes(
    variants: Sequence[Model],
    spec: ModelSpec,
    kind: str,
    settings: Settings,
    deployment: Deployment | None = None,
    host_free_bytes: int | None = None,
) -> EngineSizes:
    """Slots, LoRA rank and host memory for the variants of a base, in engines on such a device. Host memory
    is at most a quarter of `host_free_bytes`; None: unknown."""
    if not spec.adaptable:
        return EngineSizes(variant_slots=0, lora_rank=0, variant_host_bytes=MIN_HOST_BYTES)
    usual = usual_engine(kind, settings)
    slots = max(usual.slots, min(MAX_SLOTS, settings.max_variants, len(variants)))
    rank = max((usual.lora_rank, *_ranks(variants)))
    held = int(HOST_MARGIN * sum(v.variant_spec.weight_bytes for v in variants if v.variant_spec))
    share = held if host_free_bytes is None else min(held, host_free_bytes // HOST_SHARE)
    host_bytes = min(settings.variant_host_bytes, max(MIN_HOST_BYTES, share))
    chosen = EngineSizes(variant_slots=slots, lora_rank=rank, variant_host_bytes=host_bytes)
    return known_sizes(deployment).or_else(chosen)


def _ranks(variants: Iterable[Model]) -> tuple[int, ...]:
    """The rank of each registered LoRA adapter."""
    specs = [v.variant_spec for v in variants if v.variant_spec]
    return tuple(spec.max_rank for spec in specs if spec.kind is VariantKind.LORA)


def merged_slots(
    deployment: Deployment, variants: Sequence[Model], spec: ModelSpec, gpu: str
) -> tuple[bool, ...]:
    """Whether engines keep a copy of the weights to merge a variant into; the first value that fits
    counts."""
    if not _can_merge(variants, spec):
        return (False,)
    if (known := known_sizes(deployment).merged_slot) is not None:
        return (known,)
    fastest = deployment.intent is Intent.MIN_LATENCY and compute_capability(gpu) == HOPPER
    return (True, False) if fastest else (False,)


def _can_merge(variants: Iterable[Model], spec: ModelSpec) -> bool:
    """Sparse deltas are merged into weights of 16 bits; engines on CPUs have 32 bits by default."""
    kinds = {v.variant_spec.kind for v in variants if v.variant_spec}
    return VariantKind.SPARSE_DELTA in kinds and spec.dtype_bytes == 2


def variants_text(sizes: EngineSizes, variants: Sequence[Model], deployment: Deployment) -> str:
    """Slots and rank as text; empty if there are none."""
    if not sizes.variant_slots:
        return ""
    largest = max(_ranks(variants), default=0)
    if deployment.engine.lora_rank is not None:
        why = ASKED
    elif deployment.chosen is not None and deployment.chosen.lora_rank is not None:
        why = BEFORE
    else:
        why = "for registered adapters" if largest == sizes.lora_rank else "for later adapters"
    return f"rank {sizes.lora_rank} ({why}), {sizes.variant_slots} variants at once"
