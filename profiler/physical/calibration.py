"""What was learnt about one model on one kind of device: a fit for each way to cut and store its layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from profiler.measurements import Footprint, Setting
from profiler.physical.curves import StepTime
from profiler.types import ModelSpec

# In fp8, for pipelines of three models on H200s (0.24 to 0.32). vLLM leaves a broadcast of the coming tokens
# running on every stage except the last. Multiplications that fill the GPU wait for the block it displaces.
LOST_PACE = 0.27
MIN_LOST = 0.03  # what the fit may show although nothing is lost
HOP_S = 0.11e-3  # used without a measured pipeline: Llama-2-7B on two H200s, see profiler/roofline.py


@dataclass(frozen=True, order=True)
class Cut:
    """How each layer is cut and stored."""

    tensor_parallel: int
    quantization: str = "none"
    kv_dtype: str = "auto"

    @classmethod
    def of(cls, setting: Setting) -> Cut:
        return cls(setting.tensor_parallel, setting.quantization, setting.kv_dtype)

    @property
    def storage(self) -> tuple[str, str]:
        return self.quantization, self.kv_dtype


@dataclass(frozen=True)
class CutTimes:
    """Times of steps in which all sequences decode (work: sequences), and of steps that fill prompts (work:
    tokens). `head_s`: the head's part in decoding. The rest of the time outside of layers is a gap that every
    stage has between two steps. `head_s` is infinite if the head could not be separated."""

    decode: StepTime
    prefill: StepTime
    head_s: float = math.inf

    def gap_s(self, sequences: float) -> float:
        return max(0.0, self.decode.rest_s(sequences) - self.head_s)


@dataclass(frozen=True)
class VariantCost:
    """Seconds that variants of a kind add to a layer, as

        per_module_s m + per_pair_s p + pace w + more_pace w' + per_tile_s t

    m: kinds of modules. p: (module, distinct variant) pairs. w: seconds at the pace at which the base's own
    layer reads and computes. w': seconds for reading all variants except two. t in steps that decode: tiles
    of a variant's rows beyond its first tile. t in steps that fill prompts: (module, prompt) pairs beyond one
    prompt for each module, if consecutive prompts use different variants. `error`: root mean square of the
    fit's errors, relative to whole steps."""

    per_module_s: float = 0.0
    per_pair_s: float = 0.0
    pace: float = 1.0
    more_pace: float = 0.0
    per_tile_s: float = 0.0
    error: float = 0.0


@dataclass(frozen=True)
class VariantCosts:
    """Costs of one kind of variant, in steps that decode and in prefill steps. `widest`: the most requests of
    the measured loads; `most`: their most distinct variants."""

    decode: VariantCost
    prefill: VariantCost
    widest: int = 1
    most: int = 1


@dataclass(frozen=True)
class KindsTogether:
    """The time of several kinds in one batch, over the sum of each kind's time, and the error of that ratio
    (root mean square, relative to whole steps)."""

    decode: float = 1.0
    prefill: float = 1.0
    decode_error: float = 0.0
    prefill_error: float = 0.0


@dataclass(frozen=True)
class Calibration:
    """`hop_s`: the time that a boundary between two stages adds to a step. `turn_s`: the least time of each
    of several groups in flight in a step, and `turn_error` its relative error. If every measured stage hid
    the turn, `turn_most_s` is its upper bound. `lost_pace`: by quantization, the share of its pace that a
    stage which fills prompts loses while later stages still run its previous step. A step takes at most
    `batched_tokens`. `variants` has the measured kinds, by VariantKind's value, and `together` the sets of
    kinds that were measured in one batch."""

    spec: ModelSpec
    batched_tokens: int
    times: Mapping[Cut, CutTimes]
    hop_s: float = HOP_S
    turn_s: float = 0.0
    turn_error: float = 0.0
    turn_most_s: float = 0.0
    lost_pace: Mapping[str, float] = field(default_factory=dict)
    footprints: tuple[Footprint, ...] = field(default=())
    variants: Mapping[str, VariantCosts] = field(default_factory=dict)
    together: Mapping[frozenset[str], KindsTogether] = field(default_factory=dict)

    def at(self, cut: Cut) -> CutTimes:
        """The times of a cut. Raises KeyError if it was not measured."""
        if cut in self.times:
            return self.times[cut]
        raise KeyError(cut)

    def lost_pace_at(self, cut: Cut) -> float:
        """The lost share of pace with a cut; each quantization's kernels lose another share. A quantization
        without a measured pipeline gets LOST_PACE if another quantization loses any pace, else 0."""
        elsewhere = LOST_PACE if max(self.lost_pace.values(), default=0.0) > MIN_LOST else 0.0
        return self.lost_pace.get(cut.quantization, elsewhere)
