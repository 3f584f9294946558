"""What requests and answers of the management API are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

if TYPE_CHECKING:
    from profiler.types import Interval


_PART = "[A-Za-z0-9][A-Za-z0-9._-]*"
NAME_PATTERN = f"^{_PART}(/{_PART})?$"
MAX_NAME = 95
NAME_RULE = (
    "1 to 95 letters, digits, '.', '_' or '-', beginning with a letter or digit; at most one '/', as "
    "in names of a hub"
)
Name = Annotated[
    str, StringConstraints(pattern=NAME_PATTERN, max_length=MAX_NAME), Field(description=f"{NAME_RULE}.")
]
# What the API's paths have behind a model's name.
PATH_WORDS = frozenset({"profile", "estimate", "plans", "evaluations", "prefetch", "logs"})


def _without_path_words(name: str) -> str:
    if (word := name.rpartition("/")[2]) in PATH_WORDS and "/" in name:
        raise ValueError(
            f"'{name}' would be read as a call of the API, because of '/{word}'; choose another name"
        )
    return name


NewName = Annotated[Name, AfterValidator(_without_path_words)]


class View(BaseModel):
    """An answer. Its validator is made when it is first needed: a command of the CLI needs few of them."""

    model_config = ConfigDict(defer_build=True)


class Strict(BaseModel):
    """A request. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class IntervalView(View):
    """A figure, and the range that should hold it nine times out of ten."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, interval: Interval, factor: float = 1.0) -> IntervalView:
        return cls(value=interval.value * factor, low=interval.low * factor, high=interval.high * factor)
