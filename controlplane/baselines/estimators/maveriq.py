"""MaverIQ's estimator, equations 1 to 6 of the paper, with the constants of its artifact.

(1) L = TTFT + o TPOT                                    o: output tokens
(4) TTFT = n TTFT_layer + TTFT_other                     n: layers
(5) TPOT = n TPOT_layer + TPOT_other
(2) L(TP,PP) = L(1,1) / (TP PP^a) + (TP-1)^b / PP^g O_TP + (PP-1)^d O_PP
(3) O_TP = L(2,1) - L(1,1) / 2,   O_PP = L(1,2) - L(1,1) / 2^a
    The artifact's code measures L(1,2) at PP = 1, so its O_PP = L(1,1) (1 - 2^-a); its constants were
    fitted so, and that is the default here. PipelineTerm.PAPER takes fingerprints of PP = 2.
(6) X(B) = X(1) + (B-1) max(0, X(2) - X(1))              for latency and memory
Memory M(TP,PP) = M(1,1) + (TP-1) A + TP (PP-1) A_p,  A = M(2,1) - M(1,1),  A_p = M(1,2) - M(1,1),
    each linear in n from two fingerprints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from controlplane.baselines.estimators.tables import Measurement, Point, points
from controlplane.baselines.estimators.types import Family, Interval, NotPredictable, Prediction, Query

# Nine in ten errors at batch 1 should be below this; the paper gives medians only (4.4%, 4.1%).
SPREAD = 0.15


class PipelineTerm(StrEnum):
    CODE = "code"
    PAPER = "paper"


@dataclass(frozen=True)
class Exponents:
    """The exponents a, b, g, d of equation 2."""

    alpha: float
    beta: float
    gamma: float
    delta: float


# Exponents by (dtype, INT8 KV cache), as in the artifact's code, to four places.
EXPONENTS: Mapping[tuple[str, bool], Exponents] = {
    ("float16", False): Exponents(0.0491, 0.6858, 0.1877, 0.5686),
    ("float16", True): Exponents(0.0567, 0.4770, 0.6472, 0.3088),
    ("int8", False): Exponents(0.0734, 0.6848, 0.9457, 0.4982),
    ("int8", True): Exponents(0.0000, 0.3886, 0.5518, 0.7020),
    ("int4", False): Exponents(0.1555, 0.8140, 0.5062, 0.3220),
    ("int4", True): Exponents(0.0744, 0.4380, 0.8046, 0.4306),
    ("int4_gptq", False): Exponents(0.0584, 0.5912, 0.6822, 0.4356),
}


@dataclass(frozen=True)
class Components:
    """Seconds per token or prompt, of one hidden layer and of everything else."""

    ttft_layer: float
    ttft_other: float
    tpot_layer: float
    tpot_other: float

    def latency_s(self, layers: int, output_tokens: int) -> float:
        """Latency by equations 1, 4 and 5."""
        ttft = layers * self.ttft_layer + self.ttft_other
        return ttft + output_tokens * (layers * self.tpot_layer + self.tpot_other)

    def clamped(self) -> Components:
        return Components(
            max(0.0, self.ttft_layer),
            max(0.0, self.ttft_other),
            max(0.0, self.tpot_layer),
            max(0.0, self.tpot_other),
        )


def extract(
    latency: Callable[[int, int], float], layers: tuple[int, int], outputs: tuple[int, int]
) -> Components:
    """Equations 1, 4 and 5 solved for two fingerprints (n1 < n2 layers) and two output lengths (o1 < o2).

    `latency(n, o)` in seconds. Nothing is clamped.
    """
    (n1, n2), (o1, o2) = layers, outputs
    step1, step2 = (latency(n2, o) - latency(n1, o) for o in outputs)
    tpot_layer = (step2 - step1) / ((o2 - o1) * (n2 - n1))
    tpot_other = (latency(n1, o2) - latency(n1, o1)) / (o2 - o1) - n1 * tpot_layer
    ttft_layer = step1 / (n2 - n1) - o1 * tpot_layer
    ttft_other = latency(n1, o1) - n1 * ttft_layer - o1 * (n1 * tpot_layer + tpot_other)
    return Components(ttft_layer, ttft_other, tpot_layer, tpot_other)


def parallel_latency_s(
    tp: int, pp: int, reference: float, tp_overhead: float, pp_overhead: float, by: Exponents
) -> float:
    """Latency by equation 2. `reference` is L(1,1); overheads are O_TP and O_PP; all clamped at 0."""
    shared = max(0.0, reference) / (tp * float(pp) ** by.alpha)
    allreduce = (tp - 1) ** by.beta / pp**by.gamma * max(0.0, tp_overhead) if tp > 1 else 0.0
    hops = (pp - 1) ** by.delta * max(0.0, pp_overhead) if pp > 1 else 0.0
    return float(shared + allreduce + hops)


def parallel_memory(tp: int, pp: int, base: float, activations: float, pipeline: float) -> float:
    """Memory: W + A, then A for each further rank of a stage, A_p for each rank of each further stage."""
    return max(0.0, base) + (tp - 1) * max(0.0, activations) + tp * (pp - 1) * max(0.0, pipeline)


def batched(first: float, second: float | None, batch: int) -> float:
    """A figure at a batch, by equation 6."""
    return first if second is None else first + (batch - 1) * max(0.0, second - first)


@dataclass
class MaverIQ:
    """MaverIQ's estimator. `exponents` by (dtype, INT8 KV cache). `clamp_components` clamps the four
    components as well."""

    fingerprints: Iterable[Measurement]
    exponents: Mapping[tuple[str, bool], Exponents] = field(default_factory=lambda: EXPONENTS)
    pipeline_term: PipelineTerm = PipelineTerm.CODE
    clamp_components: bool = True
    name: str = "maveriq"

    def __post_init__(self) -> None:
        self._points: dict[tuple[Family, int, int, int], list[Point]] = {}
        for point in points(self.fingerprints):
            q = point.query
            self._points.setdefault((q.family, q.tensor_parallel, q.pipeline_parallel, q.batch), []).append(
                point
            )
        self._components: dict[tuple[Family, int, int, int], Components] = {}
        self._memories: dict[tuple[Family, int, int, int], tuple[float, float] | None] = {}

    def predict(self, query: Query) -> Prediction:
        first = self.latency_s(query, 1)
        second = self.latency_s(query, 2) if query.batch > 1 else None
        latency = batched(first, second, query.batch)
        memory = self._memory(query)
        return Prediction(_around(latency), None if memory is None else _around(memory))

    def latency_s(self, query: Query, batch: int) -> float:
        """Latency by equations 2 and 3 at batch 1 or 2."""
        try:
            by = self.exponents[query.family.dtype, query.family.int8_kv]
        except KeyError:
            raise NotPredictable(f"no constants for {query.family.format}") from None
        reference, tp_overhead, second_stage = self.references(query, batch, self.pipeline_term)
        return parallel_latency_s(
            query.tensor_parallel,
            query.pipeline_parallel,
            reference,
            tp_overhead,
            second_stage - reference / 2**by.alpha,
            by,
        )

    def references(self, query: Query, batch: int, term: PipelineTerm) -> tuple[float, float, float]:
        """L(1,1), O_TP and L(1,2) for the full model at `batch`. O_TP is 0 for a query with TP = 1."""
        reference = self._extrapolated(query, 1, 1, batch)
        tp_overhead = 0.0
        if query.tensor_parallel > 1:
            tp_overhead = self._extrapolated(query, 2, 1, batch) - reference / 2
        needs_stage = term is PipelineTerm.PAPER and query.pipeline_parallel > 1
        return reference, tp_overhead, self._extrapolated(query, 1, 2, batch) if needs_stage else reference

    def _extrapolated(self, query: Query, tp: int, pp: int, batch: int) -> float:
        key = (query.family, tp, pp, batch)
        if key not in self._components:
            self._components[key] = self._extract(key)
        return self._components[key].latency_s(query.layers, query.output_tokens)

    def _extract(self, key: tuple[Family, int, int, int]) -> Components:
        latencies = {(p.query.layers, p.query.output_tokens): p.latency_s for p in self._points.get(key, [])}
        layers, outputs = _two({n for n, _ in latencies}), _two({o for _, o in latencies})
        if layers is None or outputs is None or any((n, o) not in latencies for n in layers for o in outputs):
            family, tp, pp, batch = key
            raise NotPredictable(
                f"no fingerprints of two depths and two output lengths for {family.format} "
                f"TP={tp} PP={pp} batch {batch}"
            )
        components = extract(lambda n, o: latencies[n, o], layers, outputs)
        return components.clamped() if self.clamp_components else components

    def _memory(self, query: Query) -> float | None:
        first = self._memory_at(query, 1)
        if first is None or query.batch == 1:
            return first
        second = self._memory_at(query, 2)
        return None if second is None else batched(first, second, query.batch)

    def _memory_at(self, query: Query, batch: int) -> float | None:
        base = self._line(query, 1, 1, batch)
        wide = self._line(query, 2, 1, batch) if query.tensor_parallel > 1 else base
        deep = self._line(query, 1, 2, batch) if query.pipeline_parallel > 1 else base
        if base is None or wide is None or deep is None:
            return None
        return parallel_memory(query.tensor_parallel, query.pipeline_parallel, base, wide - base, deep - base)

    def _line(self, query: Query, tp: int, pp: int, batch: int) -> float | None:
        """Memory of the full model on the line through two fingerprints of the shortest output."""
        key = (query.family, tp, pp, batch)
        if key not in self._memories:
            self._memories[key] = self._fit_line(key)
        line = self._memories[key]
        return None if line is None else line[0] + query.layers * line[1]

    def _fit_line(self, key: tuple[Family, int, int, int]) -> tuple[float, float] | None:
        measured = [p for p in self._points.get(key, []) if p.memory_bytes is not None]
        shortest = min((p.query.output_tokens for p in measured), default=0)
        memory_of = {p.query.layers: p.memory_bytes for p in measured if p.query.output_tokens == shortest}
        layers = _two(set(memory_of))
        if layers is None:
            return None
        low, high = (memory_of[n] or 0.0 for n in layers)
        slope = (high - low) / (layers[1] - layers[0])
        return low - layers[0] * slope, slope


def _two(values: set[int]) -> tuple[int, int] | None:
    """The two smallest values."""
    if len(values) < 2:
        return None
    first, second = sorted(values)[:2]
    return first, second


def _around(value: float) -> Interval:
    value = max(0.0, value)
    return Interval(value, value * (1 - SPREAD), value * (1 + SPREAD))
