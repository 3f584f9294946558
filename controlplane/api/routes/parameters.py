"""Parameters that several routes have."""

from __future__ import annotations

from typing import Annotated

from fastapi import Header, Path
from pydantic import StringConstraints

IdempotencyHeader = Annotated[
    Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]{1,200}$")] | None,
    Header(alias="Idempotency-Key", description="Repeating a request with its key repeats its answer."),
]
NamePath = Annotated[str, Path(min_length=1, max_length=200)]
