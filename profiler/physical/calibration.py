"""What was learnt about one model on one kind of device: a fit for each way to cut and store its layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from profiler.measurements import Footprint, Setting
from profiler.physical.curves import StepTime
from profiler.types import ModelSpec

# In fp8, of pipelines of three models on H200s (0.24 to 0.32). vLLM leaves a broadcast of the tokens to come
# running on every stage but the last; multiplications that fill the GPU wait for the block it displaces.
LOST_PACE = 0.27
MIN_LOST = 0.03  # what the fit may see where nothing is lost
HOP_S = 0.11e-3  # without a measured pipeline: Llama-2-7B on two H200s, see profiler/roofline.py


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
    """Steps in which all sequences decode (work: sequences), and that fill prompts (work: tokens). `head_s`:
    what decoding takes of the head; whatever else is beside layers, every stage has between two steps.
    Infinite where that is not told apart."""

    decode: StepTime
    prefill: StepTime
    head_s: float = math.inf

    def gap_s(self, sequences: float) -> float:
        return max(0.0, self.decode.rest_s(sequences) - self.head_s)


@dataclass(frozen=True)
class VariantCost:
    """Seconds that variants of a kind add to a layer, as

        per_module_s m + per_pair_s p + pace w + more_pace w' + per_tile_s t

    m kinds of modules, p (module, distinct variant) pairs, w seconds at the pace at which the base's own
    layer reads and computes, w' those of reading all variants but two. t of steps that decode: tiles of a
    variant's rows beyond its first; of those that fill prompts: (module, prompt) pairs beyond a prompt's for
    each module, where prompts one after the other ask different variants. `error`: root mean square of the
    fit's errors, relative to whole steps."""

    per_module_s: float = 0.0
    per_pair_s: float = 0.0
    pace: float = 1.0
    more_pace: float = 0.0
    per_tile_s: float = 0.0
    error: float = 0.0


@dataclass(frozen=True)
class VariantCosts:
    """Of one kind of variant, in steps that decode and in prefill steps. `widest`: the most requests of the
    loads that were measured; `most`: the most distinct variants."""

    decode: VariantCost
    prefill: VariantCost
    widest: int = 1
    most: int = 1


@dataclass(frozen=True)
class KindsTogether:
    """What several kinds take in one batch over the sum of what each takes, and how far loads were off that
    (root mean square, relative to whole steps)."""

    decode: float = 1.0
    prefill: float = 1.0
    decode_error: float = 0.0
    prefill_error: float = 0.0


@dataclass(frozen=True)
class Calibration:
    """`hop_s`: what a boundary between two stages adds to a step; `turn_s`: what each of several groups in
    flight takes of a step at least, and `turn_error` how far off that was (relative), or, where every stage
    seen hid it, `turn_most_s`: how long it may be. `lost_pace`: by quantization, which share of its pace a
    stage that fills prompts loses while later ones have its step before. A step takes at most
    `batched_tokens`. `variants` has the kinds that were measured, by VariantKind's value, and `together` the
    sets of kinds that were measured in one batch."""

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
        """The times of a cut. Raises KeyError when it was not measured, and nothing near it was."""
        if cut in self.times:
            return self.times[cut]
        raise KeyError(cut)

    def lost_pace_at(self, cut: Cut) -> float:
        """Other kernels lose another share: of a quantization without a measured pipeline LOST_PACE, where
        one of another quantization loses any."""
        elsewhere = LOST_PACE if max(self.lost_pace.values(), default=0.0) > MIN_LOST else 0.0
        return self.lost_pace.get(cut.quantization, elsewhere)
