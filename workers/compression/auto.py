"""The smallest artefact within a measured loss.

Methods and budgets are tried in order of their expected size. The loss of a budget is known only once it is
measured. Quality need not rise with size, so no candidate is skipped on the way up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from profiler.errors import AdapterError
from workers.compression.choose import MethodName, Options
from workers.compression.quality import Loss, described, worst

FILLED = 0.8  # a low-rank delta takes more than this share of its budget


@dataclass(frozen=True)
class Candidate:
    """A method with options; `least_share`: its least size as a share of a linear layer's 16-bit size."""

    options: Options
    least_share: float

    @property
    def name(self) -> str:
        """`deltamix-0.0625`, `deltacompress-2bit`."""
        options = self.options
        bits = "" if options.bits is None else f"-{options.bits}bit"
        ratio = "" if options.ratio is None else f"-{options.ratio:g}"
        return f"{options.method}{bits}{ratio}"


def _sparse(bits: int) -> Candidate:
    """2:4 keeps half of the values, and their places in 1 bit per weight (docs/formats.md)."""
    return Candidate(Options(MethodName.deltacompress, bits=bits), (bits / 2 + 1) / 16)


def _mixed(ratio: float) -> Candidate:
    """The program of equation 8 fills the ratio, except for less than one rank."""
    return Candidate(Options(MethodName.deltamix, ratio=ratio), FILLED * ratio)


CANDIDATES: tuple[Candidate, ...] = (
    _mixed(1 / 32), _mixed(1 / 16), _mixed(1 / 8), _sparse(2), _sparse(4), _mixed(1 / 4),
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """The sizes of a candidate's artefact.

    `size_bytes` are stored; `code_bytes` of them are linear layers, and no method changes the rest.
    `dense_bytes` is the 16-bit size of these layers.
    """

    size_bytes: int
    code_bytes: int
    dense_bytes: int


@dataclass(frozen=True)
class Tried:
    """The result of one candidate.

    `refused` is the reason why it could not code the model, else empty. `losses` are also empty for a
    candidate that is larger than another within the limit.
    """

    candidate: Candidate
    sizes: Sizes | None = None
    losses: tuple[Loss, ...] = ()
    refused: str = ""

    def within(self, max_loss: float) -> bool:
        """Whether every task was measured to lose at most `max_loss` percent."""
        return bool(self.losses) and worst(self.losses).value <= max_loss

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.candidate.name,
            "size_bytes": self.sizes and self.sizes.size_bytes,
            "losses": described(self.losses),
            "refused": self.refused or None,
        }

    def __str__(self) -> str:
        if self.sizes is None:
            return f"{self.candidate.name}: {self.refused}"
        lost = f"loses {worst(self.losses)}" if self.losses else "not measured, because it is not smaller"
        return f"{self.candidate.name}: {self.sizes.size_bytes / 1e6:.3g} MB, {lost}"


@dataclass(frozen=True)
class Chosen:
    """The smallest candidate within the limit, and all tried candidates in order."""

    best: Tried
    tried: tuple[Tried, ...]


class Refused(AdapterError):
    """A candidate cannot code the model, for this reason; another candidate may."""


class LossTooLarge(AdapterError):
    """No candidate is within the limit. `tried` has all of them."""

    def __init__(self, max_loss: float, tried: tuple[Tried, ...]) -> None:
        self.tried = tried
        measured = [each for each in tried if each.losses]
        least = min(measured, key=lambda each: worst(each.losses).value)
        super().__init__(
            f"every compression loses more than {max_loss:g}; allow a larger loss, or register the fine-tune "
            f"as a base. The smallest loss has {least}. All candidates: "
            f"{', '.join(str(each) for each in tried)}"
        )


def smallest(
    candidates: Sequence[Candidate],
    compress: Callable[[Candidate], Sizes],
    quality: Callable[[Candidate], tuple[Loss, ...]],
    max_loss: float,
) -> Chosen:
    """The smallest artefact that loses at most `max_loss` percent on every task.

    `quality` is measured right after `compress`. A candidate is skipped only if its least size is no less
    than the size of the best so far. So if every artefact has at least its candidate's share, none within the
    limit is smaller than the chosen one. `compress` raises Refused if it cannot code the model. Raises
    LossTooLarge if no candidate is within the limit, and Refused if all are refused.
    """
    best: Tried | None = None
    tried: list[Tried] = []
    refusal: Refused | None = None
    for candidate in sorted(candidates, key=lambda each: each.least_share):
        limit = None if best is None else best.sizes
        if limit is not None and candidate.least_share * limit.dense_bytes >= limit.code_bytes:
            break
        try:
            made = compress(candidate)
        except Refused as error:
            refusal = refusal or error
            tried.append(Tried(candidate, refused=str(error)))
            continue
        smaller = limit is None or made.size_bytes < limit.size_bytes
        attempt = Tried(candidate, made, quality(candidate) if smaller else ())
        tried.append(attempt)
        if attempt.within(max_loss):
            best = attempt
    if best is not None:
        return Chosen(best, tuple(tried))
    if refusal is not None and all(each.refused for each in tried):
        raise refusal
    raise LossTooLarge(max_loss, tuple(tried))
