"""The job of one measuring process: one engine setting and its loads. Plain data, as JSON."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from profiler.measurements import Point, Setting, SyntheticVariant

MIX_TOKENS = 7  # of an answer, for variants on a CPU: they may take many times longer
VARIANTS_VARIABLE = "OSTINATO_MEASURING_VARIANTS"  # tells an engine's ranks that there are variants


class Job(BaseModel):
    """Measure the model in `folder` (config and tokenizer; weights are made up) in one `setting`.

    At most `device_bytes` of each device are used, and no point begins after `seconds`. Measurements are
    appended to `out`; points already in it are not measured again. A point is repeated while it has taken
    less than `point_seconds`. If `start_barrier` is set, no device is touched before that file exists.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: Path
    out: Path
    setting: Setting
    points: tuple[Point, ...] = Field(min_length=1)
    device_kind: str  # "cpu" or "cuda"
    device_bytes: int = Field(gt=0)
    dtype: str = "bfloat16"
    output_tokens: int = Field(default=32, ge=4)
    repeats: int = Field(default=3, ge=1)
    seconds: float = Field(default=600.0, gt=0)
    point_seconds: float = Field(default=120.0, gt=0)
    start_barrier: Path | None = None
    distinct_layers: int = Field(default=0, ge=0)  # held by each stage and repeated; 0: all
    slots: int = Field(default=0, ge=0)  # the least number for variants; with variants, as many as they need
    max_model_len: int = Field(default=4096, ge=8)
    graphs: bool = True
    own_process: bool = True  # the engine's core in another process than its client, as in production

    @property
    def variants(self) -> tuple[SyntheticVariant, ...]:
        """Every variant that a point names. If there are any, the engine is started with variants."""
        return tuple(dict.fromkeys(variant for point in self.points for variant in point.mix))


def tokens_of(job: Job, point: Point) -> int:
    """The tokens of each answer: all requests decode together for about `job.output_tokens` steps.

    The first request also decodes during the prefill of the others.
    """
    if point.mix and job.device_kind == "cpu":
        return min(MIX_TOKENS, job.output_tokens)
    return job.output_tokens + job.setting.prefill_steps(point.batch, point.input_tokens) - 1
