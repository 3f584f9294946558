"""The reason for a placement, as one sentence for people."""

from __future__ import annotations

from collections.abc import Iterable

from placement.types import DeviceKey, Inventory, Placement, key_of
from profiler.figures import figure, objective_text
from profiler.types import Basis, Interval

GIB = 2**30
_BASIS = {Basis.PROFILE: "from its profile", Basis.ROUGH: "roughly, without a profile"}


ENGINE_ALONE = "TTFT is the engine's alone, because the request path is not measured yet"


def reason(placement: Placement, inventory: Inventory, engine_alone: bool = False) -> str:
    """The shape, its place, the number of alternatives, the objective, the expected times, and what was
    relaxed. `engine_alone`: its TTFT does not include the request path."""
    plan, choice = placement.plan, placement.choice
    used = {r.device: None for r in placement.ranks}
    free = sum(d.free_bytes for d in inventory.devices if key_of(d) in used)
    minimised = objective_text(choice.objective, choice.unit, choice.input_tokens, choice.output_tokens)
    parts = [
        f"TP={plan.tensor_parallel} x PP={plan.pipeline_parallel} on {_places(used)}: "
        f"{sum(placement.estimate.memory_bytes) / GIB:.2f} of {free / GIB:.2f} GiB free",
        f"{minimised}, the best of {choice.alternatives} layouts of "
        f"{choice.shapes} shapes that meet every limit",
        f"predicted {_BASIS[placement.estimate.basis]}: TTFT {_ms(choice.ttft)}, TPOT {_ms(choice.tpot)}",
    ]
    if engine_alone:
        parts.append(ENGINE_ALONE)
    if choice.sizes:
        parts.append(choice.sizes)
    if choice.relaxed:
        parts.append("relaxed, as allowed: " + " and ".join(relaxation.text for relaxation in choice.relaxed))
    return "; ".join(parts)


def _places(used: Iterable[DeviceKey]) -> str:
    """Nodes in the order of their first rank, with the devices used there."""
    indices_of: dict[tuple[str, str], list[int]] = {}
    for node, kind, index in used:
        indices_of.setdefault((node, kind), []).append(index)
    return ", ".join(
        f"{kind} {'+'.join(map(str, sorted(indices)))} of {node}"
        for (node, kind), indices in indices_of.items()
    )


def _ms(interval: Interval | None) -> str:
    if interval is None:
        return "unknown"
    value, low, high = (figure(s * 1e3) for s in (interval.value, interval.low, interval.high))
    return f"{value} ms ({low} to {high})"
