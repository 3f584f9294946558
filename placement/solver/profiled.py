"""Time and memory of a stage by the profiler: calibrated if this architecture was measured, else rough.

`ostinato estimate` shows the same figures, so users can examine what a choice was based on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from placement.solver.cluster import Cluster, GpuType, Link
from placement.solver.plan import Account, CandidatePlan, Lines, Shape
from placement.solver.request import Request
from placement.solver.stage_estimator import StageEstimator
from profiler.physical.calibration import Calibration
from profiler.predicting.intervals import NINE_IN_TEN
from profiler.predicting.predict import Ground, Prediction, predict
from profiler.predicting.stages import decode_time, prompt_time, rank_lines
from profiler.request_path import RequestPath
from profiler.roofline import (
    CONTEXT_ONLY,
    HOP_S,
    LINK_TO_MEMORY,
    VLLM_ON_CPU,
    VLLM_ON_GPU,
    Overheads,
    StageTime,
    allreduces_s,
)
from profiler.types import DeviceRates, Interval, ModelSpec, Plan, Workload


@dataclass(frozen=True)
class Measured:
    """A calibration of a model on one kind of device, and that device's rates.

    `excess` is how many bytes more than estimated each rank took when such a plan ran, by quantization, TP
    and PP."""

    calibration: Calibration
    rates: DeviceRates
    excess: Mapping[tuple[str, int, int], int] = field(default_factory=dict)


@dataclass(frozen=True)
class Knowledge:
    """What is known of a model. `plan` has what the search does not choose: length, slots, steps.

    `profiles` are by GPU type; a type without a profile is scaled from the first profile. For `overheads` and
    `path` see `Ground`.
    """

    spec: ModelSpec
    plan: Plan
    profiles: Mapping[str, Measured] = field(default_factory=dict)
    overheads: Overheads = CONTEXT_ONLY
    path: RequestPath | None = None

    def ground(self, kind: GpuType, ranks: int, tp: int) -> Ground:
        """The ground of `ranks` on such devices. Ranks on a measured host take turns (`Ground`)."""
        own = self.profiles.get(kind.name)
        known = own or next((self.profiles[name] for name in sorted(self.profiles)), None)
        return Ground(
            self.spec,
            (kind.rates(1 if known else tp),) * ranks,
            known.calibration if known else None,
            shared=ranks if kind.shared else 1,
            measured=known.rates if known and own is None else None,
            overheads=self.overheads,
            path=self.path,
        )

    def excess(self, kind: GpuType, shape: tuple[str, int, int]) -> int:
        """Bytes of each rank beyond its estimate, for a `shape` (quantization, TP, PP); taken from other GPU
        types if this type has no profile."""
        own = self.profiles.get(kind.name)
        known = (own,) if own else tuple(self.profiles.values())
        return max((measured.excess.get(shape, 0) for measured in known), default=0)


class Profiled(StageEstimator):
    def __init__(self, cluster: Cluster, request: Request, known: Knowledge | None = None) -> None:
        super().__init__(cluster, request)
        self._known = known or _unmeasured(cluster, request)
        self._lines: dict[tuple[str, int, int], tuple[Lines, ...]] = {}

    @property
    def hidden_bytes(self) -> int:
        return self._known.spec.hidden_size * self._known.spec.dtype_bytes

    @property
    def boundary_s(self) -> float:
        return self._calibration.hop_s if self._calibration else HOP_S

    @property
    def turn_s(self) -> float:
        return self._calibration.turn_s if self._calibration else 0.0

    @property
    def path_s(self) -> float:
        path = self._known.path
        return path.mean_s(1, self._request.input_tokens) if path else 0.0

    @property
    def _calibration(self) -> Calibration | None:
        return self._known.ground(self._fastest, 1, 1).calibration

    def prompt_time(self, shape: Shape, kind: GpuType, link: Link) -> StageTime:
        tokens = self._request.input_tokens
        alone = prompt_time(self._ground(shape, kind), self._plan(shape), tokens)
        return self._linked(alone, shape, kind, link, tokens)

    def token_time(self, shape: Shape, kind: GpuType, link: Link, sequences: float) -> StageTime:
        context = self._request.input_tokens + self._request.output_tokens / 2
        alone = decode_time(self._ground(shape, kind), self._plan(shape), sequences, context)
        return self._linked(alone, shape, kind, link, sequences)

    def lines(self, shape: Shape, stage: int) -> Lines:
        key = (shape.compression.name, shape.tp, shape.pp)
        if key not in self._lines:
            more = self._known.excess(self._fastest, key)
            stages = rank_lines(self._ground(shape, self._fastest), self._plan(shape))
            self._lines[key] = tuple(tuple((fixed + more, each) for fixed, each in s) for s in stages)
        return self._lines[key][stage]

    def account(self, plan: CandidatePlan) -> Account:
        """The account of a plan; for a pipeline over several types, that of the type with the widest
        interval."""
        made = dataclasses.replace(self._plan(plan.shape), layers_per_stage=plan.layers)
        load = Workload(1, self._request.input_tokens, self._request.output_tokens)
        kinds = dict.fromkeys(self._types[stage.gpu_type] for stage in plan.stages)
        predictions = [predict(self._ground(plan.shape, kind), made, load) for kind in kinds]
        worst = max(predictions, key=lambda p: p.tpot_s.high / p.tpot_s.low)
        low, high = _share(worst.tpot_s)
        tpot_s = self(plan).tpot_s
        more = 1 + NINE_IN_TEN * self._turn_error(plan, tpot_s)
        most = max(high * more, self._turns_most_s(plan) / tpot_s)
        return Account(made, worst.basis, _share(worst.ttft_s), (low / more, most), _notes(predictions))

    def _turn_error(self, plan: CandidatePlan, tpot_s: float) -> float:
        """The relative error of the host's turns if they decide a token's time, else 0."""
        turns_s = self.turns_s(plan.shape)
        if self._calibration is None or not turns_s or tpot_s > turns_s:
            return 0.0
        return self._calibration.turn_error

    def _turns_most_s(self, plan: CandidatePlan) -> float:
        """The longest time of the host's turns if every measured pipeline hid them."""
        return self.turns(plan.shape) * self._calibration.turn_most_s if self._calibration else 0.0

    def _ground(self, shape: Shape, kind: GpuType) -> Ground:
        return self._known.ground(kind, shape.ranks, shape.tp)

    def _plan(self, shape: Shape) -> Plan:
        """The plan of a shape with one layer in each stage: the number of layers is not used."""
        return dataclasses.replace(
            self._known.plan,
            tensor_parallel=shape.tp,
            layers_per_stage=(1,) * shape.pp,
            quantization=shape.compression.name,
            max_model_len=self._request.context or self._known.plan.max_model_len,
            max_sequences=self._request.concurrency,
            kv_cache_tokens=self._request.kv_tokens,
        )

    def _linked(self, alone: StageTime, shape: Shape, kind: GpuType, link: Link, tokens: float) -> StageTime:
        """The time with all-reduces over this link, instead of the fast link that was measured or assumed."""
        if kind.shared or shape.tp == 1:
            return alone
        assumed = kind.memory_bytes_per_s * LINK_TO_MEMORY
        fast = self._links[Link.FAST] if self._known.profiles else assumed
        more_s = allreduces_s(self._known.spec, shape.tp, tokens, self._links[link])
        more_s -= allreduces_s(self._known.spec, shape.tp, tokens, fast)
        return StageTime(alone.layer_s + more_s, alone.rest_s, alone.gap_s)


def _unmeasured(cluster: Cluster, request: Request) -> Knowledge:
    """The knowledge of a deployment by vLLM whose architecture is not profiled yet."""
    spec = request.model.spec
    if spec is None:
        raise ValueError(
            f"{request.name}: expected a model with a spec; use the roofline for a model of plain figures"
        )
    length = request.context or request.input_tokens + request.output_tokens
    on_cpu = any(kind.shared for kind in cluster.types)
    plan = Plan(1, (spec.num_layers,), "none", length, request.kv_tokens, 0, 0)
    return Knowledge(spec, plan, overheads=VLLM_ON_CPU if on_cpu else VLLM_ON_GPU)


def _share(interval: Interval) -> tuple[float, float]:
    return interval.low / interval.value, interval.high / interval.value


def _notes(predictions: list[Prediction]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(note for prediction in predictions for note in prediction.notes))
