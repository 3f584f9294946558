"""Times operations on a GPU: correct first, then fast.

An operation's module offers `cases() -> list[Case]`. Preparing a case allocates `copies` distinct sets of
arguments, as the layers of a model are distinct, so that none is found in the L2 cache (60 MB on an H200)
when its turn comes again. Each contender is first checked against `expected`, on poisoned scratch; one that
is wrong gets no speed. Then all copies run in turn inside one CUDA graph, as in the engine, and the median
of several replays divided by the copies is reported.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

ROTATED_BYTES = 240_000_000  # four times the L2 cache
MAX_COPIES = 400
REPLAYS = 20
COPY_BYTES = 2_000_000_000

BATCHES = (1, 8, 32, 128)
PREFILL = 2048
PREFILL_REQUESTS = 16
DISTRIBUTIONS = ("identical", "uniform", "zipf-1.5", "distinct")
MIXED = "mixed"  # one variant's prefill, and a row of each other one that decodes
MIXED_ROWS, MIXED_VARIANTS = 930 + 27, 1 + 27

Int32s = npt.NDArray[np.int32]
Labels = dict[str, str | int]  # of a case, for the report


@dataclass(frozen=True)
class Shape:
    """A linear as vLLM fuses it: `inputs` features to slices of the given widths."""

    name: str
    inputs: int
    slices: tuple[int, ...]

    @property
    def outputs(self) -> int:
        return sum(self.slices)


# These sizes only check whether everything runs.
TINY = tuple(Shape(f"tiny-{count}", 128, (64,) * count) for count in (1, 3))
SHAPES = (
    Shape("7b-qkv", 4096, (4096, 4096, 4096)),
    Shape("7b-o", 4096, (4096,)),
    Shape("7b-gate-up", 4096, (11008, 11008)),
    Shape("7b-down", 11008, (4096,)),
    Shape("qwen-qkv", 3584, (3584, 512, 512)),
    Shape("qwen-gate-up", 3584, (18944, 18944)),
    Shape("qwen-down", 18944, (3584,)),
)


@dataclass(frozen=True)
class Contender:
    """One way to do the work. `launch(i)` runs copy i; `output(i)` is the tensor it wrote.

    `reset(i)` puts copy i's output back to what it was before any launch and poisons its scratch.
    A CUDA graph cannot hold all peers: `graph=False` times plain launches between events instead.
    `expected` as in `Prepared`, of one whose weights are its own.
    """

    name: str
    launch: Callable[[int], object]
    output: Callable[[int], torch.Tensor]
    reset: Callable[[int], object]
    graph: bool = True
    expected: Callable[[int], torch.Tensor] | None = None


@dataclass(frozen=True)
class Prepared:
    """A case ready to run. `bytes_moved` and `flops` are what one launch cannot avoid.

    `expected(i)` is copy i's right output in float64 or float32; an output is right when no row's error
    exceeds `tolerance` times that row's length (2-norm).
    """

    copies: int
    bytes_moved: int
    flops: int
    expected: Callable[[int], torch.Tensor]
    tolerance: float
    contenders: Sequence[Contender]


@dataclass(frozen=True)
class Case:
    """A case to time: labels for the report, and its preparation."""

    labels: Labels
    prepare: Callable[[torch.device], Prepared]
    urgent: bool = False  # timed first

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.labels.items())


@dataclass(frozen=True)
class Rates:
    """The device's limits, measured in the same run."""

    copy_bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Measurement:
    labels: Labels
    contender: str
    error: float
    correct: bool
    us: float | None = None
    bytes_moved: int = 0
    tb_per_s: float | None = None
    percent_of_copy: float | None = None
    floor_us: float | None = None
    percent_of_floor: float | None = None
    copies: int = 0
    replays_us: list[float] = field(default_factory=list)


def copies_for(bytes_per_copy: int) -> int:
    """The number of distinct copies after which the cache holds nothing of the first."""
    return min(MAX_COPIES, max(2, math.ceil(ROTATED_BYTES / bytes_per_copy)))


def slots_for(distribution: str, rows: int, variants: int, seed: int = 0) -> Int32s:
    """int32 [rows]: which of `variants` each row belongs to. A prefill is made of whole requests."""
    if rows >= PREFILL:
        requests = slots_for(distribution, PREFILL_REQUESTS, variants, seed)
        return np.repeat(requests, math.ceil(rows / PREFILL_REQUESTS))[:rows]
    if distribution == MIXED:
        return np.maximum(np.arange(rows, dtype=np.int32) - (rows - variants), np.int32(0))
    random = np.random.default_rng(seed)
    slots: npt.NDArray[np.integer]
    if distribution == "identical":
        slots = np.zeros(rows, np.int32)
    elif distribution == "uniform":
        slots = random.integers(0, variants, rows)
    elif distribution == "distinct":
        slots = np.arange(rows) % variants
    elif distribution == "zipf-1.5":
        weights = np.arange(1, variants + 1) ** -1.5
        slots = random.choice(variants, rows, p=weights / weights.sum())
    else:
        raise ValueError(f"a distribution named {distribution!r}; expected one of {(*DISTRIBUTIONS, MIXED)}")
    return np.asarray(slots, np.int32)


def error_of(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative error of a row, by 2-norm; infinite when anything is not a number."""
    difference = (got.double() - expected.double()).norm(dim=-1)
    length = expected.double().norm(dim=-1).clamp_min(1e-30)
    worst = float((difference / length).max())
    return worst if math.isfinite(worst) else math.inf


def measure(case: Case, rates: Rates | None, device: torch.device) -> list[Measurement]:
    """Check, then time, every contender of a case. Without rates, only check: that works on a CPU, too."""
    prepared = case.prepare(device)
    measured = [_measure(case, prepared, contender, rates) for contender in prepared.contenders]
    del prepared
    gc.collect()
    torch.cuda.empty_cache()
    return measured


def _measure(case: Case, prepared: Prepared, contender: Contender, rates: Rates | None) -> Measurement:
    try:
        error = max(_check(prepared, contender, copy) for copy in {0, prepared.copies - 1})
    except Exception as failure:  # one contender's, often a peer's: others are measured all the same
        print(f"{case} {contender.name}: {type(failure).__name__}: {str(failure)[:500]}", flush=True)
        error = math.inf
    correct = error <= prepared.tolerance
    if not correct or rates is None:
        return Measurement(case.labels, contender.name, error, correct)
    replays = _time(contender, prepared.copies)
    us = statistics.median(replays)
    floor = 1e6 * max(
        prepared.bytes_moved / rates.copy_bytes_per_s,
        prepared.flops / rates.flops_per_s,
    )
    return Measurement(
        case.labels,
        contender.name,
        error,
        correct=True,
        us=us,
        bytes_moved=prepared.bytes_moved,
        tb_per_s=prepared.bytes_moved / us / 1e6,
        percent_of_copy=100 * prepared.bytes_moved / us * 1e6 / rates.copy_bytes_per_s,
        floor_us=floor,
        percent_of_floor=100 * floor / us,
        copies=prepared.copies,
        replays_us=replays,
    )


def _check(prepared: Prepared, contender: Contender, copy: int) -> float:
    contender.reset(copy)
    contender.launch(copy)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return error_of(contender.output(copy), (contender.expected or prepared.expected)(copy))


def _time(contender: Contender, copies: int) -> list[float]:
    """Microseconds per launch, of several passes over all copies."""

    def once() -> None:
        for copy in range(copies):
            contender.launch(copy)

    once()  # whatever is still to be compiled or allocated
    torch.cuda.synchronize()
    replay = _captured(once) if contender.graph else once
    for _ in range(3):
        replay()
    found = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        found.append(1000 * start.elapsed_time(end) / copies)
    return found


def _captured(run: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def measure_rates(device: torch.device) -> Rates:
    return Rates(_copy_bytes_per_s(device), _flops_per_s(device))


def _copy_bytes_per_s(device: torch.device) -> float:
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _seconds(lambda: target.copy_(source))


def _flops_per_s(device: torch.device) -> float:
    left, right = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * 8192**3 / _seconds(lambda: left @ right)


def _seconds(run: Callable[[], object]) -> float:
    found: list[float] = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1000)
    return statistics.median(found[2:])


def selected(cases: Iterable[Case], conditions: Sequence[str]) -> list[Case]:
    """The cases that meet every `key=value[,value]`, urgent ones first; one without the key does not."""
    wanted = [condition.split("=", 1) for condition in conditions]
    found = [
        case
        for case in cases
        if all(str(case.labels.get(key)) in values.split(",") for key, values in wanted)
    ]
    return sorted(found, key=lambda case: not case.urgent)
