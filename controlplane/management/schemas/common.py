"""What requests and answers of the management API are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

if TYPE_CHECKING:
    from profiler.types import Interval


NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,94}$"
Name = Annotated[
    str,
    StringConstraints(pattern=NAME_PATTERN),
    Field(description="1 to 95 letters, digits, '.', '_' or '-', beginning with a letter or digit."),
]


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
