"""Parameters that several routes have."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Header, Path, Request
from pydantic import StringConstraints

from controlplane.api.middleware import caller_of
from controlplane.traffic.tenants import Caller


async def _who_asks(request: Request) -> Caller:
    return caller_of(request.scope)


Asking = Annotated[Caller, Depends(_who_asks)]

IdempotencyHeader = Annotated[
    Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]{1,200}$")] | None,
    Header(alias="Idempotency-Key", description="Repeating a request with its key repeats its answer."),
]
NamePath = Annotated[str, Path(min_length=1, max_length=200)]
