"""The `compression` block of a registration: how a fine-tune is to become a delta, and how far that is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from pydantic import Field, StringConstraints, model_validator

from controlplane.management.schemas.common import Strict, View

if TYPE_CHECKING:
    from controlplane.state.deltas import Artifact, Delta
    from workers.compression.lines import Quality, TaskLoss

Method = Literal[
    "auto",
    "deltacompress",
    "deltamix",
    "magnitude",
    "low-rank",
    "delta-come",
    "bitdelta",
    "sparse-gpt",
    "round-to-nearest",
]
FilePath = Annotated[str, StringConstraints(min_length=1, max_length=4096)]

# Which of these options each method takes, as `workers.compression.choose.TAKES` has it.
TAKES: Mapping[str, frozenset[str]] = {
    "auto": frozenset(),
    "deltacompress": frozenset({"bits", "group_size"}),
    "deltamix": frozenset({"ratio", "max_widths"}),
    "magnitude": frozenset({"bits", "group_size"}),
    "low-rank": frozenset({"ratio"}),
    "delta-come": frozenset({"ratio"}),
    "bitdelta": frozenset(),
    "sparse-gpt": frozenset({"bits", "group_size"}),
    "round-to-nearest": frozenset({"bits", "group_size"}),
}
OPTIONS = {"bits": "bits", "ratio": "ratio", "groupSize": "group_size", "maxWidths": "max_widths"}
JUDGED_ONLY = frozenset({"bitdelta", "sparse-gpt", "round-to-nearest"})  # no engine serves them as a variant


class CompressionForm(Strict):
    """How to compress. Files are read by the server, in folders that it may read from."""

    method: Method | None = Field(
        default=None,
        description="auto: the smallest delta that loses at most maxLoss on the evaluation. Default: "
        "auto with a maxLoss, deltacompress without.",
    )
    bits: Literal[2, 4] | None = Field(default=None, description="Bits of each kept value.")
    ratio: float | None = Field(
        default=None, gt=0, le=1, description="Share of the fine-tune's 16-bit size, such as 0.0625."
    )
    groupSize: int | None = Field(
        default=None,
        ge=8,
        le=1 << 20,
        multiple_of=8,
        description="Columns that share a scale. Default: a row.",
    )
    maxWidths: int | None = Field(default=None, ge=1, le=16, description="Bit widths a layer may mix.")
    calibration: FilePath | None = Field(
        default=None, description="A file of typical texts. Default: the bundled file."
    )
    rows: int | None = Field(
        default=None, ge=1, le=100_000, description="Number of calibration texts to use."
    )
    tokens: int | None = Field(default=None, ge=8, le=1 << 20, description="Tokens of each calibration text.")
    evaluation: FilePath | None = Field(default=None, description="A file of tasks to measure the loss on.")
    maxLoss: float | None = Field(
        default=None, ge=0, le=100, description="For auto: largest loss on any task, in percent."
    )
    lossless: bool = Field(default=False, description="Pack files with zstd if that makes loading faster.")
    device: Literal["auto", "cpu", "gpu"] = Field(
        default="auto", description="auto: a GPU that nothing else uses, or else a CPU."
    )

    @property
    def chosen(self) -> Method:
        return self.method or ("auto" if self.maxLoss is not None else "deltacompress")

    @model_validator(mode="after")
    def _consistent(self) -> CompressionForm:
        if self.chosen in JUDGED_ONLY:
            servable = [name for name in get_args(Method) if name not in JUDGED_ONLY]
            raise ValueError(
                f"'{self.chosen}' makes a plain checkpoint, which engines do not serve as a variant; choose "
                f"one of {', '.join(servable)}, or run `ostinato compress` and register the result as a base"
            )
        for field, option in OPTIONS.items():
            if getattr(self, field) is not None and option not in TAKES[self.chosen]:
                taking = [name for name in TAKES if option in TAKES[name] and name not in JUDGED_ONLY]
                raise ValueError(
                    f"the method '{self.chosen}' has no {field}; leave {field} out, or choose "
                    f"{' or '.join(taking)}"
                )
        self._check_evaluation()
        return self

    def _check_evaluation(self) -> None:
        if self.chosen == "auto" and (self.evaluation is None or self.maxLoss is None):
            raise ValueError(
                "the method 'auto' needs `evaluation` (a file of tasks) and `maxLoss` (the largest loss, in "
                "percent); give both, or name another method"
            )
        if self.chosen != "auto" and self.maxLoss is not None:
            raise ValueError(
                f"only the method 'auto' takes maxLoss, not '{self.chosen}'; leave maxLoss out, or choose "
                "'auto'"
            )


class TaskLossView(View):
    """One task, `before` (the uncompressed fine-tune) and `after`. `loss` and its 95 % interval are in points
    of 100 for a share of right answers, in percent for a perplexity."""

    task: str
    metric: str
    before: float
    after: float
    loss: float
    low: float | None
    high: float | None
    items: int

    @classmethod
    def of(cls, t: TaskLoss) -> TaskLossView:
        return cls(**dataclasses.asdict(t))


class QualityView(View):
    """`accuracy`: what is left of the task that lost most, in percent of the uncompressed fine-tune's."""

    accuracy: float
    losses: list[TaskLossView]

    @classmethod
    def of(cls, q: Quality) -> QualityView:
        return cls(accuracy=q.accuracy, losses=[TaskLossView.of(each) for each in q.losses])


class ArtifactView(View):
    """What came out. `layerErrors` are mean relative errors of layers' outputs, by kind of module."""

    method: str
    sizeBytes: int
    uncompressedBytes: int
    ratio: float
    layerErrors: dict[str, float]
    quality: QualityView | None
    warnings: list[str]
    seconds: float

    @classmethod
    def of(cls, a: Artifact) -> ArtifactView:
        return cls(
            method=a.method,
            sizeBytes=a.size_bytes,
            uncompressedBytes=a.tuned_bytes,
            ratio=a.ratio,
            layerErrors=dict(a.layer_errors),
            quality=None if a.quality is None else QualityView.of(a.quality),
            warnings=list(a.warnings),
            seconds=a.seconds,
        )


class CompressionView(View):
    """How a variant is, or was, made of a fine-tune. `share` (0..1) is done, `etaS` seconds are left, null
    where nothing can be said of them; `step` is what is being done, on `node`."""

    method: str
    options: dict[str, int | float | str | bool]
    share: float
    etaS: float | None
    step: str
    node: str
    artifact: ArtifactView | None

    @classmethod
    def of(cls, d: Delta) -> CompressionView:
        given = d.recipe.given()
        return cls(
            method=given.pop("method"),
            options=given,
            share=d.share if d.artifact is None else 1.0,
            etaS=d.left_s,
            step=d.doing,
            node=d.node,
            artifact=None if d.artifact is None else ArtifactView.of(d.artifact),
        )
