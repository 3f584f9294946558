"""The controller's part in whole deployments: fail, undeploy, cancel; load and unload variants.

Everything is in the records: after it was killed at any point, its successor repeats or continues the action.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from controlplane import errors
from controlplane.controller.interfaces import EngineControl, Hooks
from controlplane.controller.transitions import (
    delete_deployment,
    end_open_operations,
    find_loading,
    mark_deployed,
    mark_unavailable,
    note_open_operations,
)
from controlplane.planning import fetching, lora_ranks, rescheduling, retrying
from controlplane.state.operations import End
from controlplane.state.queries import variant_ref
from controlplane.state.records import Deployment, OperationKind, Phase
from controlplane.state.repository import Change, Put, Repository, State, Versioned
from controlplane.state.transactions import Superseded, persist
from controlplane.state.worker_groups import group_id_of, is_spare
from workers.fetching.messages import Progress
from workers.messages import VariantRef

log = logging.getLogger(__name__)

UNLOAD_S = 10.0  # limit for unloading a variant that one engine took and another one refused
LOOK_S = 0.5

Stop = Callable[[str], Awaitable[None]]


class _DeployedVariant(NamedTuple):
    """The deployment (None: gone) and name of a variant's base, and the variant as its engines know it."""

    base: Deployment | None
    base_name: str
    variant: VariantRef


class DeploymentActions:
    """One method per action of `reconcile`; its argument is the base or the variant of the action."""

    def __init__(self, repository: Repository, cluster: EngineControl, hooks: Hooks, stop: Stop) -> None:
        """`stop` ends the engine of a worker group."""
        self._repository = repository
        self._cluster = cluster
        self._stop = stop
        self._note, self._conclude, self._view = hooks.note, hooks.conclude, hooks.view
        self._fetched = hooks.fetched

    async def fail(self, name: str) -> None:
        state = await self._repository.read_async()
        if name not in state.deployments:
            raise Superseded(name)
        deployment = state.deployments[name].record
        if deployment.base != name:
            await self._fail_one(name, errors.EngineFailed(f"the base of '{name}' could not be deployed"))
            return
        if deployment.established:
            raise Superseded(name)  # its groups show why
        failed = [view for g in deployment.group_ids() if (view := self._view(g)) and view.status == "failed"]
        detail = rescheduling.readable(failed[0].message) if failed else "no reason given"
        await self._stop_groups(deployment)
        await self.fail_all(name, errors.EngineFailed(f"the engine of '{name}' could not start: {detail}"))

    async def _stop_groups(self, deployment: Deployment) -> None:
        for group_id in deployment.group_ids():
            await self._stop(group_id)

    async def fail_all(self, base_name: str, error: errors.OstinatoError) -> None:
        """End the deployments of a base and of all its variants with the same error, at once; do nothing if
        the base serves. A base that has ever served stays, and its variants show why they are unavailable."""

        def change(state: State) -> Sequence[Change]:
            base = state.deployments.get(base_name)
            if base is not None and (base.record.serving_ids() or base.record.phase is Phase.DELETING):
                raise Superseded(base_name)
            changes = _failed(state, base, error) if base else []
            return [*changes, *_failed_variants(state, base_name, error)]

        with suppress(Superseded):
            await self._conclude(OperationKind.DEPLOY, base_name, End.failed(error), change)

    async def _fail_one(self, name: str, error: errors.OstinatoError) -> None:
        """End a variant's deployment, unless it is being undeployed. A variant that has ever served stays,
        and shows why it is unavailable."""

        def change(state: State) -> Sequence[Change]:
            deployment = state.deployments.get(name)
            if deployment is None or deployment.record.phase is Phase.DELETING:
                raise Superseded(name)
            return _failed(state, deployment, error)

        with suppress(Superseded):
            await self._conclude(OperationKind.DEPLOY, name, End.failed(error), change)

    async def undeploy(self, base_name: str) -> None:
        await self._note(OperationKind.UNDEPLOY, base_name, Phase.DELETING, "stopping the engine", 0.3)
        deployment = (await self._repository.read_async()).deployments.get(base_name)
        if deployment is not None:
            await self._stop_groups(deployment.record)
        await self._forget_deployment(base_name)

    async def _forget_deployment(self, name: str) -> None:
        """Delete a deployment that was to be deleted; end its open operations."""
        overtaken = End(Phase.CANCELLED, "undeployed while it was being deployed")

        def change(state: State) -> Sequence[Change]:
            deployment = state.deployments.get(name)
            if deployment is None or deployment.record.phase is not Phase.DELETING:
                raise Superseded(name)
            endings = end_open_operations(state, OperationKind.DEPLOY, name, overtaken)
            return [*delete_deployment(state, deployment), *endings]

        await self._conclude(OperationKind.UNDEPLOY, name, End(Phase.DELETED, "undeployed"), change)

    # --- variants ------------------------------------------------------------------------------

    async def _variant(self, name: str) -> _DeployedVariant:
        state = await self._repository.read_async()
        if name not in state.deployments or name not in state.models:
            raise Superseded(name)
        base_name = state.deployments[name].record.base
        base = state.deployments.get(base_name)
        return _DeployedVariant(
            base.record if base else None, base_name, variant_ref(state.models[name].record)
        )

    async def load_variant(self, name: str) -> None:
        """Load a variant into the engines of its base.

        An engine that refuses it ends its deployment, with the reason. But if it does not fit into an engine
        that is about to be replaced, the successor is asked. If no engine can be reached, the attempt is
        repeated as `retrying` says.
        """
        base, base_name, variant = await self._variant(name)
        await self._note(
            OperationKind.DEPLOY, name, Phase.DEPLOYING, await self._loading(name, base_name), 0.7
        )
        narrow = await self._narrow(name, base)
        group_ids = [group_id for group_id in base.serving_ids() if group_id not in narrow] if base else []
        try:
            await self._have_files(name, base, group_ids)
        except errors.OstinatoError as e:
            await self._not_fetched(name, base_name, variant, e)
            return
        calls = (self._cluster.load_variant(group_id, variant) for group_id in group_ids)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        failed = narrow | {
            group_id: _as_error(answer, base_name)
            for group_id, answer in zip(group_ids, answers, strict=True)
            if isinstance(answer, BaseException)
        }
        refused = {group_id: e for group_id, e in failed.items() if not retrying.may_pass(e)}
        if refused and await self._replaced(name, variant, refused):
            return  # the engines that serve then are asked
        if refused:
            await self._fail_one(name, next(iter(refused.values())))
            await self._unload(group_ids, variant)
            return
        failures = list(failed.values())
        # An engine that cannot be reached now loads it with its next request.
        if len(failures) == len(answers):
            none = errors.Unavailable(f"no engine of '{base_name}' serves at the moment")
            await self._not_loaded(name, base_name, variant, failures[0] if failures else none)
            return
        message = f"served by the engine of '{base_name}', in one batch with the base"
        await self._conclude(
            OperationKind.DEPLOY,
            name,
            End(Phase.DEPLOYED, message),
            lambda s: [mark_deployed(s, name, variant.uid)],
        )

    async def _have_files(self, name: str, base: Deployment | None, group_ids: Collection[str]) -> None:
        """Fetch a variant's files onto the nodes of these groups."""
        groups = base.groups if base else ()
        placements = [g.placement for g in groups if base and group_id_of(base.base, g.number) in group_ids]
        nodes = {rank.node for placement in placements if placement for rank in placement.ranks}

        async def tell(progress: Progress) -> None:
            await self._note(OperationKind.DEPLOY, name, Phase.DEPLOYING, fetching.described(progress), 0.7)

        await self._fetched([name], nodes, tell)

    async def _not_fetched(
        self, name: str, base_name: str, variant: VariantRef, error: errors.OstinatoError
    ) -> None:
        if retrying.may_pass(error):
            await self._not_loaded(name, base_name, variant, error)
        else:
            await self._fail_one(name, error)

    async def _narrow(self, name: str, base: Deployment | None) -> dict[str, errors.OstinatoError]:
        """The error of each engine that takes LoRA adapters of smaller ranks only."""
        model = (await self._repository.read_async()).models.get(name)
        if model is None or base is None:
            return {}
        return {
            group_id: errors.AdapterMismatch(lora_ranks.mismatch(model.record, base.model, most))
            for group_id, most in lora_ranks.narrow_groups(model.record, base).items()
        }

    async def _replaced(
        self, name: str, variant: VariantRef, refused: Mapping[str, errors.OstinatoError]
    ) -> bool:
        """Whether none of the engines that refused a variant stays. Waits until their successors serve.

        Raises Superseded when the variant's deployment is gone, or has ended, meanwhile.
        """
        if not all(isinstance(error, errors.AdapterMismatch) for error in refused.values()):
            return False  # its files are damaged for every engine
        told = ""
        while True:
            state = await self._repository.read_async()
            base_name = find_loading(state, name, variant.uid).record.base
            successors = _successors(state, base_name, refused)
            if "" in successors:
                return False
            if not successors:
                return True
            names, (error, *_) = ", ".join(successors), refused.values()
            if (message := f"'{name}' waits for {names}: {retrying.cause(error)}") != told:
                await self._note(OperationKind.DEPLOY, name, Phase.DEPLOYING, message, 0.7)
                told = message
            await asyncio.sleep(LOOK_S)

    async def _loading(self, name: str, base_name: str) -> str:
        """The message about the current attempt, and the failure before it."""
        deployment = (await self._repository.read_async()).deployments.get(name)
        message, loading = (
            f"loading the variant into the engine of '{base_name}'",
            deployment and deployment.record.loading,
        )
        if not loading or not loading.failures:
            return message
        attempt = f"attempt {loading.failures + 1} of {retrying.LOADING.attempts}"
        return f"{message}, {attempt}; the last attempt failed: {loading.reason}"

    async def _not_loaded(
        self, name: str, base_name: str, variant: VariantRef, error: errors.OstinatoError
    ) -> None:
        """Record the time of the next attempt, with the reason in the operation; or end the deployment."""
        now_s, state = time.time(), await self._repository.read_async()
        loading = find_loading(state, name, variant.uid).record.loading
        attempts = retrying.failed(loading, retrying.cause(error), now_s, retrying.LOADING, name)
        if attempts is None:
            advice = f"`ostinato logs {base_name}` shows why, then deploy '{name}' again"
            await self._fail_one(name, retrying.given_up(loading, error, now_s, advice))
            return
        message = retrying.describe(attempts, retrying.LOADING, name)
        log.warning("'%s' could not be loaded: %s", name, message)

        def once() -> None:
            newest = self._repository.read()
            deployment = find_loading(newest, name, variant.uid)
            waits = replace(deployment.record, loading=attempts, reason=message)
            noted = note_open_operations(newest, OperationKind.DEPLOY, name, message, now_s)
            self._repository.commit([Put(waits, deployment.version), *noted])

        await asyncio.to_thread(persist, once)

    async def _unload(self, group_ids: Sequence[str], variant: VariantRef) -> None:
        """Unload a variant from the engines that took it, after another engine refused it.

        An engine that does not answer keeps it: no request names it, and a later deployment finds it there.
        """
        calls = (self._cluster.unload_variant(group_id, variant) for group_id in group_ids)
        with suppress(TimeoutError):
            async with asyncio.timeout(UNLOAD_S):
                await asyncio.gather(*calls, return_exceptions=True)

    async def unload_variant(self, name: str) -> None:
        base, base_name, variant = await self._variant(name)
        await self._note(
            OperationKind.UNDEPLOY, name, Phase.DELETING, f"unloading the variant from '{base_name}'", 0.5
        )
        for group_id in base.group_ids() if base else ():
            await self._cluster.unload_variant(group_id, variant)
        await self._forget_deployment(name)

    async def stop_cancelled(self, name: str) -> None:
        """Stop the engine of a base whose deployment is cancelled, and fail the variants that wait for it."""
        state = await self._repository.read_async()
        if name not in state.deployments or state.deployments[name].record.base != name:
            return
        await self._stop_groups(state.deployments[name].record)
        error = errors.EngineFailed(f"the deployment of its base '{name}' was cancelled")
        for variant in _variants(state, name):
            await self._fail_one(variant.record.model, error)


def _as_error(failure: BaseException, base_name: str) -> errors.OstinatoError:
    if isinstance(failure, errors.OstinatoError):
        return failure
    return errors.EngineFailed(f"the engine of '{base_name}' failed: {type(failure).__name__}: {failure}")


def _failed(state: State, deployment: Versioned[Deployment], error: errors.OstinatoError) -> list[Change]:
    """The changes for a deployment that cannot continue; none while it is being undeployed."""
    record = deployment.record
    if record.phase is Phase.DELETING or (record.established and record.base == record.model):
        return []
    if record.established:
        return mark_unavailable(deployment, error.message)
    return delete_deployment(state, deployment)


def _failed_variants(state: State, base_name: str, error: errors.OstinatoError) -> list[Change]:
    """As `_failed`, for a base's variants, with the ends of their operations."""
    changes: list[Change] = []
    for variant in _variants(state, base_name):
        changes += _failed(state, variant, error)
        changes += end_open_operations(state, OperationKind.DEPLOY, variant.record.model, End.failed(error))
    return changes


def _successors(state: State, base_name: str, group_ids: Collection[str]) -> list[str]:
    """The successor of each of these groups that still serves; empty for a group that stays."""
    deployment = state.deployments.get(base_name)
    if deployment is None:
        return []
    groups = deployment.record.groups
    spares = {group_id_of(base_name, g.replaces or 0): g.number for g in groups if is_spare(g, groups)}
    return [
        group_id_of(base_name, spares[group_id]) if group_id in spares else ""
        for group_id in deployment.record.serving_ids()
        if group_id in group_ids
    ]


def _variants(state: State, base_name: str) -> list[Versioned[Deployment]]:
    """The deployments of a base's variants, except those that are being undeployed."""
    return [
        variant
        for variant in state.deployments.values()
        if variant.record.base == base_name != variant.record.model
        and variant.record.phase is not Phase.DELETING
    ]
