"""From a management request to a committed operation, once per idempotency key."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable

from controlplane import errors
from controlplane.api.services import Services, fresh_context
from controlplane.management import commands
from controlplane.management.schemas.deploy import DeployModelRequest
from controlplane.management.schemas.models import OperationView, RegisterModelRequest
from controlplane.state import queries, transactions
from controlplane.state.records import IdempotencyKey, Operation, Phase
from controlplane.state.repository import Put, State, Versioned
from controlplane.state.transactions import Context, Outcome

KEEP_ALIVE_S = 10.0
MAX_WATCHERS = 5_000  # of a gateway: less than its places, which requests for models need as well


async def register(services: Services, request: RegisterModelRequest, key: str | None) -> Operation:
    return await _submit(
        services,
        key,
        f"register_model {request.model_dump_json()}",
        lambda state, ctx: commands.register_model(state, request, ctx),
    )


async def deploy(services: Services, request: DeployModelRequest, key: str | None) -> Operation:
    return await _submit(
        services,
        key,
        f"deploy_model {request.model_dump_json()}",
        lambda state, ctx: commands.deploy_model(state, request, ctx),
    )


async def undeploy(services: Services, name: str, key: str | None) -> Operation:
    return await _submit(
        services, key, f"undeploy {name}", lambda state, ctx: commands.undeploy_model(state, name, ctx)
    )


async def delete(services: Services, name: str, key: str | None) -> Operation:
    return await _submit(
        services, key, f"delete {name}", lambda state, ctx: commands.delete_model(state, name, ctx)
    )


async def profile(services: Services, name: str, again: bool, key: str | None) -> Operation:
    return await _submit(
        services,
        key,
        f"profile {name} {again}",
        lambda state, ctx: commands.profile_model(state, name, again, ctx),
    )


async def cancel(services: Services, operation_id: str) -> Operation:
    def decide(state: State) -> Outcome:
        return commands.cancel_operation(state, operation_id, fresh_context().now_s)

    outcome = await asyncio.to_thread(transactions.submit, services.repository, decide)
    return outcome.operation


async def _submit(
    services: Services, key: str | None, request: str, decide: Callable[[State, Context], Outcome]
) -> Operation:
    ctx = fresh_context()
    digest = hashlib.sha256(request.encode()).hexdigest()

    def once(state: State) -> Outcome:
        known = _answered(state, key, digest) if key else None
        return Outcome(known, []) if known else decide(state, ctx)

    def remember(outcome: Outcome) -> list[Put]:
        return [Put(IdempotencyKey(key, digest, outcome.operation.id, ctx.now_s), 0)] if key else []

    outcome = await asyncio.to_thread(transactions.submit, services.repository, once, remember)
    return outcome.operation


def _answered(state: State, key: str, digest: str) -> Operation | None:
    """The operation an earlier request with this key began. Errors: IdempotencyConflict."""
    known = state.idempotency.get(key)
    if known is None:
        return None
    if known.record.request_sha256 != digest:
        raise errors.IdempotencyConflict(
            f"Idempotency-Key '{key}' was used for another request; use a new key for a new request"
        )
    if known.record.answer is not None:
        return known.record.answer
    return queries.find_operation(state, known.record.operation_id).record


async def run(services: Services, submitted: Awaitable[Operation]) -> Operation:
    """Wait for an operation's end. Raises what it failed with, or TimedOut."""
    done = await _ended(services, await submitted, services.settings.engine_start_timeout_s)
    if done.error is not None:
        raise failure_of(done)
    if done.phase is Phase.CANCELLED:
        raise errors.NotReady(f"'{done.target}': {done.reason}")
    return done


async def _ended(services: Services, operation: Operation, limit_s: float) -> Operation:
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + limit_s
    known: Versioned[Operation] | None = queries.find_operation(await services.read(), operation.id)
    while known is not None and not known.record.done and (left_s := ends_s - loop.time()) > 0:
        known = await services.routes.operations.changed(operation.id, known, left_s)
    if known is None or not known.record.done:
        raise errors.TimedOut(f"nothing came of it within {limit_s:.0f} s; it goes on in the background")
    return known.record


def failure_of(operation: Operation) -> errors.OstinatoError:
    """The error a failed operation holds, as the exception it was."""
    return errors.error_from_body(operation.error or {"message": operation.reason})


async def watch(services: Services, operation_id: str) -> AsyncGenerator[bytes, None]:
    """Server-sent events: the operation at every change, the last time when it is done.

    Errors: OperationNotFound; Overloaded, when very many watch. Both before the first event.
    """
    queries.find_operation(await services.read(), operation_id)
    if services.routes.operations.waiting >= MAX_WATCHERS:
        raise errors.Overloaded(
            f"{MAX_WATCHERS} clients watch operations at this gateway; ask for the operation now and then",
            details={"reason": "watchers"},
            retry_after_s=5.0,
        )
    return _events(services, operation_id)


async def _events(services: Services, operation_id: str) -> AsyncGenerator[bytes, None]:
    known: Versioned[Operation] | None = queries.find_operation(await services.read(), operation_id)
    told: Versioned[Operation] | None = None
    while known is not None:
        if known is told:
            yield b": still at it\n\n"
        else:
            told = known
            yield b"data: " + OperationView.of(known.record).model_dump_json().encode() + b"\n\n"
        if known.record.done:
            return
        known = await services.routes.operations.changed(operation_id, known, KEEP_ALIVE_S)
