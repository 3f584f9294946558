"""Measurements of a model on a device: times and memory of one way to run it, and what to measure.

Plain data, kept as JSON lines, so that estimators work from files alone.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from profiler.errors import MeasurementError


@dataclass(frozen=True)
class Setting:
    """One way to start the engine. `layers_per_stage` of a fingerprint sums to its few hidden layers.

    `quantization` is one of `profiler.quantization` or an engine's own name, `kv_dtype` the engine's name;
    "none" and "auto" leave the model as it is. A step takes at most `batched_tokens` tokens. Every batch
    with variants launches the kernels of the kinds in `launched`, because its CUDA graphs were captured with
    them. If `launched` is empty, a batch launches the kernels of its own variants only.
    """

    layers_per_stage: tuple[int, ...]
    tensor_parallel: int = 1
    quantization: str = "none"
    kv_dtype: str = "auto"
    batched_tokens: int = 2048
    launched: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.layers_per_stage or min(self.layers_per_stage) < 1 or self.tensor_parallel < 1:
            raise ValueError(f"expected stages of at least one layer, and a TP of at least 1, got {self}")

    @property
    def layers(self) -> int:
        return sum(self.layers_per_stage)

    def prefill_steps(self, batch: int, input_tokens: int) -> int:
        """Number of steps that `batch` prompts of `input_tokens` take."""
        return math.ceil(batch * input_tokens / self.batched_tokens)

    @property
    def world_size(self) -> int:
        return self.tensor_parallel * len(self.layers_per_stage)


@dataclass(frozen=True, order=True)
class SyntheticVariant:
    """A synthetic variant to measure with. A number that does not belong to its `kind` (a VariantKind's
    value) is 0: `rank` is LoRA's, `bits` a sparse delta's, `factors` and `block_size` BOFT's. Seeds make
    equal variants distinct."""

    kind: str
    rank: int = 0
    bits: int = 0
    factors: int = 0
    block_size: int = 0
    seed: int = 0

    @property
    def label(self) -> str:
        numbers = {"rank": self.rank, "bits": self.bits, "m": self.factors, "b": self.block_size}
        return " ".join([self.kind, *(f"{name}={number}" for name, number in numbers.items() if number)])


@dataclass(frozen=True, order=True)
class Point:
    """A load: `batch` simultaneous requests of `input_tokens` that use `mix` in turn (empty: the base)."""

    batch: int
    input_tokens: int
    mix: tuple[SyntheticVariant, ...] = ()

    def __post_init__(self) -> None:
        if min(self.batch, self.input_tokens) < 1:
            raise ValueError(f"expected at least one request of at least one token, got {self}")


@dataclass(frozen=True)
class Timing:
    """Medians over repeats, in seconds. All requests arrive at once at an idle engine.

    `ttft_s` is the mean over the requests, `ttft_last_s` the TTFT of the last one. `tpot_s` is the time of a
    step in which all requests decode (if they ever do: `together`), after `output_tokens` / 2 tokens on
    average. `latency_s` is the time until the last request ends. `device_step_s` has, by rank, the time of
    such a step on the device itself; it is empty if the device cannot tell. `taken_s` is the duration of the
    measurement, with all repeats and warm-up; 0 if it was not recorded.
    """

    setting: Setting
    point: Point
    output_tokens: int
    ttft_s: float
    ttft_last_s: float
    tpot_s: float
    latency_s: float
    device_step_s: tuple[float, ...] = ()
    taken_s: float = 0.0

    @property
    def together(self) -> bool:
        """Whether the first request still decodes when the last prompt is filled."""
        point = self.point
        return self.output_tokens > self.setting.prefill_steps(point.batch, point.input_tokens) + 1


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank: its weights, a forward pass at its peak, captured graphs, the runtime and its
    communication, and the KV cache with its tokens.

    `held` is all device memory that the process had taken when it was ready, as the device counts it; 0 if it
    was not recorded. It includes a pass's peak only as far as the allocator kept it.
    """

    weights: int
    activations: int
    graphs: int
    runtime: int
    kv_cache: int
    kv_tokens: int
    held: int = 0

    @property
    def without_kv_cache(self) -> int:
        return self.weights + self.activations + self.graphs + self.runtime


@dataclass(frozen=True)
class Footprint:
    """Memory of every rank, and the seconds it took to start the engine.

    Each stage held at most `distinct_layers` different layers; 0: all of its layers differed. `packed`: the
    engine packed the weights (on a CPU), so `runtime` includes them.
    """

    setting: Setting
    ranks: tuple[RankMemory, ...]
    start_s: float
    distinct_layers: int = 0
    packed: bool = False

    def taken(self, rank: RankMemory) -> int:
        """Bytes that `rank` had taken when it was ready, without its KV cache, as the device counts them.
        Buffers of the first step are included; the part of a pass's peak that the allocator gave back is not.
        If nothing was recorded, or on a CPU (which gives an engine its cache page by page), the sum of the
        rank's parts."""
        counted = rank.held > 0 and not self.packed
        return rank.held - rank.kv_cache if counted else rank.without_kv_cache


Measurement = Timing | Footprint
_KINDS: dict[str, type[Timing] | type[Footprint]] = {"timing": Timing, "footprint": Footprint}
_TYPES: dict[str, TypeAdapter[Any]] = {kind: TypeAdapter(type_) for kind, type_ in _KINDS.items()}


def to_line(measurement: Measurement) -> str:
    kind = next(kind for kind, type_ in _KINDS.items() if isinstance(measurement, type_))
    return json.dumps({"kind": kind, **dataclasses.asdict(measurement)})


def from_lines(lines: Iterable[str], source: str) -> Iterator[Measurement]:
    """Parse measurements. Raises MeasurementError with `source` and the line number for an invalid line."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _parse(line, f"{source}, line {number}")


def _parse(line: str, where: str) -> Measurement:
    try:
        raw = json.loads(line)
        kind = raw.pop("kind")
        return _TYPES[kind].validate_python(raw)  # type: ignore[no-any-return]
    except ValidationError as e:
        first = e.errors()[0]
        at = ".".join(map(str, first["loc"]))
        raise MeasurementError(f"{where}: {at}: {first['msg']}, got {str(first['input'])[:80]}") from e
    except (ValueError, KeyError, AttributeError, TypeError) as e:
        expected = " or ".join(_KINDS)
        raise MeasurementError(
            f'{where}: expected a JSON object whose "kind" is {expected}, got {line[:80]!r}'
        ) from e


def read(path: Path) -> tuple[Measurement, ...]:
    """All measurements of a file, without a last line that a crash cut short. Raises MeasurementError."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as e:
        raise MeasurementError(f"{path} cannot be read: {e.strerror}") from e
    return tuple(from_lines(text[: text.rfind("\n") + 1].splitlines(), str(path)))


class Log:
    """Append measurements to a file as they are made; each is on disk before the next begins."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.exists():
            _drop_cut_line(path)

    def append(self, measurement: Measurement) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(to_line(measurement) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _drop_cut_line(path: Path) -> None:
    raw = path.read_bytes()
    whole = raw.rfind(b"\n") + 1
    if whole < len(raw):
        with path.open("r+b") as file:
            file.truncate(whole)
