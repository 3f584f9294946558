"""Commits a management request as an operation, once per idempotency key."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace

from controlplane import errors
from controlplane.api import preview
from controlplane.api.services import Services, fresh_context
from controlplane.management import commands, ownership, requested
from controlplane.management.schemas.deploy import DeployModelRequest
from controlplane.management.schemas.models import OperationView, RegisterModelRequest
from controlplane.planning import lora_ranks
from controlplane.state import queries, transactions
from controlplane.state.records import (
    Deployment,
    IdempotencyKey,
    Model,
    Operation,
    PastOperation,
    Phase,
    TenantChanges,
)
from controlplane.state.repository import Put, Repository, State, Versioned
from controlplane.state.transactions import Context, Outcome
from controlplane.traffic.tenants import Caller, Tenant

KEEP_ALIVE_S = 25.0  # proxies close a silent stream after 30 to 60 s
MAX_WATCHERS = 5_000  # per gateway: fewer than its request slots, because inference requests need slots, too


async def register(
    services: Services, request: RegisterModelRequest, key: str | None, caller: Caller
) -> Operation:
    def decide(seen: State, ctx: Context) -> Outcome:
        ownership.require_quota(caller.tenant, seen, request)
        return commands.register_model(seen, request, ctx)

    return await _submit(services, caller, key, f"register_model {request.model_dump_json()}", decide)


async def deploy(
    services: Services, request: DeployModelRequest, key: str | None, caller: Caller
) -> Operation:
    """Deploy a model. A variant of the installation's base joins its engines, and changes nothing else of
    it. An adapter of a larger rank than the engines take has them replaced, if there is room for both.

    Errors: those of `commands.deploy_model`; NoFeasiblePlan (new engines have no room next to the old ones).
    """
    requested.require_ceilings(request.engine, services.settings)
    widens = lora_ranks.widens(await services.read_for(caller), request.model)
    inventory = await services.cluster.inventory() if widens else None

    def decide(seen: State, ctx: Context) -> Outcome:
        outcome = commands.deploy_model(seen, request, ctx)
        if inventory is not None:
            changed = [change.record for change in outcome.changes if isinstance(change, Put)]
            preview.new_engines(seen, inventory, services.settings, request.model, changed)
        return outcome

    key_text = f"deploy_model {request.model_dump_json()}"
    return await _submit(services, caller, key, key_text, _own(caller, request.model, decide))


async def undeploy(services: Services, name: str, key: str | None, caller: Caller) -> Operation:
    decide = _own(caller, name, lambda seen, ctx: commands.undeploy_model(seen, name, ctx))
    return await _submit(services, caller, key, f"undeploy {name}", decide)


async def delete(services: Services, name: str, key: str | None, caller: Caller) -> Operation:
    decide = _own(caller, name, lambda seen, ctx: commands.delete_model(seen, name, ctx))
    return await _submit(services, caller, key, f"delete {name}", decide)


async def profile(services: Services, name: str, again: bool, key: str | None, caller: Caller) -> Operation:
    """Measure a model's profile. Other tenants share the profile of an architecture, so only admins may
    measure it again."""
    if again and not caller.tenant.is_admin:
        raise errors.Forbidden(
            f"tenant '{caller.tenant.name}' may not repeat measurements that other tenants share; leave "
            "`again` out to measure only what is missing, or use an admin's key",
            param="again",
        )

    def decide(seen: State, ctx: Context) -> Outcome:
        outcome = commands.profile_model(seen, name, again, ctx)
        ownership.require_change(caller.tenant, seen, outcome.operation.target)
        return outcome

    return await _submit(services, caller, key, f"profile {name} {again}", decide)


async def cancel(services: Services, operation_id: str, caller: Caller) -> Operation:
    def decide(state: State) -> Outcome:
        seen = ownership.seen_by(caller.tenant, state)
        return commands.cancel_operation(seen, operation_id, fresh_context().now_s)

    outcome = await asyncio.to_thread(transactions.submit, services.repository, decide)
    return outcome.operation


Decide = Callable[[State, Context], Outcome]


def _own(caller: Caller, name: str, decide: Decide) -> Decide:
    """`decide`, if the caller may change `name`. Errors: Forbidden."""

    def decide_own(seen: State, ctx: Context) -> Outcome:
        ownership.require_change(caller.tenant, seen, name)
        return decide(seen, ctx)

    return decide_own


async def _submit(
    services: Services, caller: Caller, key: str | None, request: str, decide: Decide
) -> Operation:
    """Commit an operation. `decide` gets the records that the caller may see."""
    ctx = fresh_context(caller)
    digest = hashlib.sha256(request.encode()).hexdigest()
    own_key = _own_key(caller, key) if key else None

    def once(state: State) -> Outcome:
        known = _answered(services.repository, state, own_key, digest) if own_key else None
        if known:
            return Outcome(known, [])
        seen = ownership.seen_by(caller.tenant, state)
        outcome = decide(seen, ctx)
        for change in outcome.changes:
            if isinstance(change, Put) and isinstance(change.record, Model):
                ownership.require_free(caller.tenant, state, change.record.name)
        ownership.require_own_changes(caller.tenant, seen, outcome.changes)
        puts = [change.record for change in outcome.changes if isinstance(change, Put)]
        deployments = [record for record in puts if isinstance(record, Deployment)]
        ownership.require_engines(caller.tenant, seen, deployments)
        turn = quota_turn(services.repository, caller.tenant, state)
        return replace(outcome, changes=[*outcome.changes, *turn])

    def remember(outcome: Outcome) -> list[Put]:
        if own_key is None:
            return []
        return [Put(IdempotencyKey(own_key, digest, outcome.operation.id, ctx.now_s), 0)]

    outcome = await asyncio.to_thread(transactions.submit, services.repository, once, remember)
    await asyncio.to_thread(services.audit.ends, outcome.changes)
    return outcome.operation


def quota_turn(repository: Repository, tenant: Tenant, state: State) -> list[Put]:
    """The extra write for each change of a tenant with quotas. It makes two concurrent changes, even at
    two gateways, run one after the other. Errors: StaleWrite, when the tenant changed something since
    `state`."""
    if not tenant.quota.is_of_records:
        return []
    last = repository.get(TenantChanges, tenant.name)
    if last is None:
        return [Put(TenantChanges(tenant.name, 1), 0)]
    if last.version > state.revision:
        raise errors.StaleWrite(
            "another request of this tenant changed the state at the same time; try again"
        )
    return [Put(TenantChanges(tenant.name, last.record.number + 1), last.version)]


def _own_key(caller: Caller, key: str) -> str:
    """The idempotency key with its tenant: tenants may choose the same keys. Neither keys nor tenants'
    names contain spaces."""
    return f"{caller.tenant.owner} {key}" if caller.tenant.owner else key


def _answered(repository: Repository, state: State, key: str, digest: str) -> Operation | None:
    """The operation that an earlier request with this key began. Errors: IdempotencyConflict; StaleWrite
    when the key is newer than `state`."""
    known = repository.get(IdempotencyKey, key)
    if known is None:
        return None
    if known.record.request_sha256 != digest:
        raise errors.IdempotencyConflict(
            f"Idempotency-Key '{key.rpartition(' ')[2]}' was already used for a different request; use a new "
            "key for a new request"
        )
    if known.version > state.revision:
        raise errors.StaleWrite("another request with this Idempotency-Key is being handled; try again")
    if known.record.operation_id not in state.operations:
        past = repository.get(PastOperation, known.record.operation_id)
        if past is not None:
            return past.record.operation
    return queries.find_operation(state, known.record.operation_id).record


async def run(services: Services, submitted: Awaitable[Operation]) -> Operation:
    """Wait for an operation's end. Raises the operation's error, or TimedOut."""
    done = await _ended(services, await submitted, services.limits.loading_timeout_s)
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
        raise errors.TimedOut(
            f"the operation did not end within {limit_s:.0f} s; it continues in the background"
        )
    return known.record


def failure_of(operation: Operation) -> errors.OstinatoError:
    """The error of a failed operation, as the original exception."""
    return errors.error_from_body(operation.error or {"message": operation.reason})


def watch(services: Services, found: Versioned[Operation]) -> AsyncGenerator[bytes, None]:
    """Server-sent events with the operation after every change, until it is done.

    Errors: Overloaded before the first event, when too many clients watch.
    """
    if services.routes.operations.waiting >= MAX_WATCHERS:
        raise errors.Overloaded(
            f"{MAX_WATCHERS} clients already watch operations at this gateway; poll GET /operations/ID "
            "instead",
            details={"reason": "watchers"},
            retry_after_s=5.0,
        )
    return _events(services, found)


async def _events(services: Services, found: Versioned[Operation]) -> AsyncGenerator[bytes, None]:
    known: Versioned[Operation] | None = found
    told: Versioned[Operation] | None = None
    while known is not None:
        if known is told:
            yield b": still running\n\n"
        else:
            told = known
            yield b"data: " + OperationView.of(known.record).model_dump_json().encode() + b"\n\n"
        if known.record.done:
            return
        known = await services.routes.operations.changed(found.record.id, known, KEEP_ALIVE_S)
