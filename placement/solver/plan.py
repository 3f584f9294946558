"""A candidate: how a model is cut, the kinds of GPUs of its stages, and its figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from placement.solver.cluster import Link
from placement.solver.request import Compression
from profiler.types import Basis, Plan

Lines = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Shape:
    """The parts of a model: `tp` ranks in each of `pp` stages, in one compression."""

    compression: Compression
    tp: int
    pp: int

    def __hash__(self) -> int:
        """A hash of what distinguishes a model's shapes, which are looked up often."""
        return hash((self.compression.name, self.tp, self.pp))

    @property
    def ranks(self) -> int:
        return self.tp * self.pp


@dataclass(frozen=True)
class Stage:
    """`layers` on `tp` GPUs of one type joined by `link`; other work makes them `slowdown` times slower."""

    layers: int
    gpu_type: str
    link: Link = Link.FAST
    slowdown: float = 1.0


@dataclass(frozen=True)
class CandidatePlan:
    """`hops` are the links between adjacent stages, one fewer than stages."""

    shape: Shape
    stages: tuple[Stage, ...]
    hops: tuple[Link, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(stage.layers for stage in self.stages)


@dataclass(frozen=True)
class Figures:
    """Seconds, requests per second, bytes. `memory_bytes` is that of each rank of a stage, by stage.

    `utilisation` is each stage's busy share under the expected rate (1 or more: it cannot keep up).
    """

    ttft_s: float
    tpot_s: float
    latency_s: float
    throughput_per_s: float
    memory_bytes: tuple[int, ...]
    utilisation: tuple[float, ...]


@dataclass(frozen=True)
class StepRates:
    """Seconds of one stage on unloaded GPUs: for each layer, and on the last stage for the rest (`rest`).
    Every other stage has the part `gap` of that between two of several batches.

    `prefill`: one prompt; `decode`: one token of one of the groups in flight; `work`: everything that one
    request costs when the engine is full.
    """

    prefill_layer_s: float
    decode_layer_s: float
    work_layer_s: float
    prefill_rest_s: float
    decode_rest_s: float
    work_rest_s: float
    decode_gap_s: float = 0.0
    work_gap_s: float = 0.0


@dataclass(frozen=True)
class Account:
    """What an estimate of a candidate is based on. The engine is to be started with `plan`.

    `ttft_share` and `tpot_share`: lower and upper end of their intervals, as shares of the figures.
    """

    plan: Plan
    basis: Basis
    ttft_share: tuple[float, float]
    tpot_share: tuple[float, float]
    notes: tuple[str, ...] = ()


class HopSeconds(NamedTuple):
    """The seconds that a hop to the next stage takes: of a prompt, and of a token."""

    prompt: float
    token: float


class Estimator(Protocol):
    """Figures of any candidate of one request; a pure function.

    Policies rank candidates by calling it. Its linear parts are `rates`, `hop_s`, `groups` (batches in
    flight) and `turns_s` (the part of the host, the least time of a token); the split of layers and the exact
    reference optimise them. `path_s`, the request path to the engine and back, is the same for all. `lines`
    are the lines of the memory of a rank (`memory`). `account` is the basis of the figures.
    """

    @property
    def path_s(self) -> float: ...

    def __call__(self, plan: CandidatePlan) -> Figures: ...

    def rates(self, shape: Shape, gpu_type: str, link: Link) -> StepRates: ...

    def hop_s(self, shape: Shape, link: Link) -> HopSeconds: ...

    def groups(self, shape: Shape) -> float: ...

    def turns_s(self, shape: Shape) -> float: ...

    def lines(self, shape: Shape, stage: int) -> Lines: ...

    def account(self, plan: CandidatePlan) -> Account: ...
