"""Deploys models one after the other as the controller does, and measures them while all are up."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from benchmarks import gpu_engine, gpu_lora
from benchmarks.chosen_sizes.asking import request_of, write_model
from benchmarks.chosen_sizes.host import Host
from benchmarks.chosen_sizes.serve import FIRST_TOKEN, GIB, Order
from benchmarks.chosen_sizes.telling import devices, ms, plan, ranks, tell
from benchmarks.profiling import shapes
from controlplane import errors
from controlplane.cluster import reservations
from controlplane.controller import registration, transitions
from controlplane.controller.group_actions import GroupActions
from controlplane.controller.interfaces import Hooks
from controlplane.management import commands
from controlplane.management.schemas.deploy import DeployModelRequest
from controlplane.planning import estimates
from controlplane.settings import Settings
from controlplane.state import transactions
from controlplane.state.operations import End
from controlplane.state.records import Model, OperationKind, Phase
from controlplane.state.repository import Change, Put, Repository, State
from controlplane.state.worker_groups import WorkerGroup
from placement.types import Inventory, Placement


class Experiment:
    """Models are deployed as the controller deploys them: the same records, actions and launches."""

    def __init__(
        self, given: argparse.Namespace, settings: Settings, repository: Repository, host: Host
    ) -> None:
        self._given, self._settings = given, settings
        self._repository, self._host = repository, host
        hooks = Hooks(_note, self._conclude, lambda group: None, lambda deployment: 1, _fetched)
        self._actions = GroupActions(settings, repository, host, hooks, _fail)

    async def deploy(self, name: str, shape: str, uid: int, result: dict[str, Any]) -> None:
        """Fills `result` as it goes."""
        self._accept(name, shape, uid, await self._host.inventory())
        await asyncio.sleep(self._given.settle_s)
        free = await self._free(name)
        result["before"] = devices(self._host.seen, free)
        tell(f"{name}: free {', '.join(f'{d.index}: {d.free_bytes / GIB:.2f} GiB' for d in free.devices)}")
        await self._actions.launch(name)
        placement = self._group(name).placement
        assert placement is not None
        result["plan"] = plan(placement)
        result["estimates"] = self._estimates(name, placement, self._host.seen)
        tell(f"{name}: {placement.reason}")
        result["start_s"] = await self._host.started(name)
        await self._actions.confirm(name)
        result["ranks"] = ranks(self._group(name))
        tell(f"{name} serves after {result['start_s']:.0f} s")

    def _accept(self, name: str, shape: str, uid: int, seen: Inventory) -> None:
        """The records that registering, measuring and deploying leave."""
        given, now_s = self._given, time.time()
        folder = write_model(given.work / "models" / name, shape, given.tokenizer)
        model = Model(
            name, uid, Phase.READY, str(folder), path=str(folder), spec=shapes.spec(shape), created_at_s=now_s
        )
        records: list[Change] = [Put(model, 0)]
        self._repository.commit(records)
        context = transactions.Context(f"op-{uid}", (100 + uid, 200 + uid), now_s)
        outcome = commands.deploy_model(self._repository.read(), request_of(name, given), context)
        self._repository.commit(outcome.changes)

    async def devices(self) -> list[dict[str, Any]]:
        free = await self._free("")
        return devices(self._host.seen, free)

    async def _free(self, name: str) -> Inventory:
        """The memory of the next decision, by the same account."""
        inventory, state = await self._host.inventory(), self._repository.read()
        return reservations.available(inventory, state.ledgers, self._settings.headroom, exclude=name)

    def _group(self, name: str) -> WorkerGroup:
        return transitions.find_group(self._repository.read(), name).group

    def _groups(self, base: str) -> tuple[WorkerGroup, ...]:
        return self._repository.read().deployments[base].record.groups

    async def _conclude(
        self,
        kind: OperationKind,
        target: str,
        end: End,
        change: Callable[[State], Sequence[Change]],
    ) -> None:
        state = self._repository.read()
        self._repository.commit([*change(state), *transitions.end_open_operations(state, kind, target, end)])
        tell(f"{target}: {end.message}")

    def _estimates(self, name: str, placement: Placement, seen: Inventory) -> list[dict[str, Any]]:
        """The figures that `ostinato estimate` shows for this plan."""
        shape = estimates.Shape(placement.plan.tensor_parallel, None, placement.plan.layers_per_stage)
        found = []
        for batch in self._given.batches:
            load = estimates.Load(batch, self._given.input_tokens, self._given.output_tokens)
            told = estimates.answer(self._repository.read(), seen, self._settings, name, shape, load)
            figures = {"ttft_s": told.prediction.ttft_s, "tpot_s": told.prediction.tpot_s}
            told_of = {what: dataclasses.asdict(figure) for what, figure in figures.items()}
            found.append({"batch": batch, "basis": told.prediction.basis, **told_of})
        return found

    async def measure(self, name: str, shape: str, result: dict[str, Any]) -> None:
        below = min(shapes.SHAPES[shape]["vocab_size"], self._given.tokens_below)
        assert below > FIRST_TOKEN
        result["measured"] = []
        for batch in self._given.batches:
            order = Order(
                batch, self._given.input_tokens, self._given.output_tokens, self._given.repeats, below
            )
            result["measured"].append(found := await self._host.measure(name, order))
            tell(f"{name}, batch {batch}: TTFT {ms(found['ttft_s'])}, TPOT {ms(found['tpot_s'])} ms")

    async def deploy_later(self, base: str, shape: str, rank: int, result: dict[str, Any]) -> None:
        """Register and deploy a random adapter as the API does, and ask it; `result` has what came of it."""
        state, uid = self._repository.read(), 7000
        folder = self._given.work / f"{base}-later"
        sizes = shapes.SHAPES[shape]
        modules = [name.split(".")[1] for name in gpu_engine.linear_shapes(sizes)]
        await asyncio.to_thread(gpu_lora.write_adapter, folder, rank, 1, sizes, modules, 0.01)
        asked = Model(folder.name, uid, Phase.PENDING, base=base, adapter=str(folder))
        limits = registration.Limits((self._given.work,), self._settings.max_lora_rank)
        told: dict[str, Any] = result.setdefault("later", {"rank": rank})
        try:
            ready = await asyncio.to_thread(
                registration.read_model_files, asked, state.models[base].record, limits, Path
            )
            self._repository.commit([Put(ready, 0)])
            context = transactions.Context("op-later", (uid + 1, uid + 2), time.time())
            request = DeployModelRequest(model=ready.name)
            outcome = commands.deploy_model(self._repository.read(), request, context)
        except errors.OstinatoError as e:
            told["refused"] = e.message
            tell(f"{folder.name}: refused: {e.message}")
            return
        self._repository.commit(outcome.changes)
        if renewing := [group.reason for group in self._groups(base) if group.replaces is not None]:
            told["new_engines"] = renewing
            tell(f"{folder.name}: {renewing[0]}")
            return
        variant = {"name": ready.name, "uid": uid, "path": str(folder)}
        order = Order(1, self._given.input_tokens, self._given.output_tokens, 1, FIRST_TOKEN + 1000, variant)
        told["served"] = found = await self._host.measure(base, order)
        tell(
            f"{ready.name}: rank {rank} is served: TTFT {ms(found['ttft_s'])}, TPOT {ms(found['tpot_s'])} ms"
        )


async def _note(
    kind: OperationKind, target: str, phase: Phase, message: str, progress: float | None = None
) -> None:
    tell(f"{target}: {phase}: {message}")


async def _fetched(*_: object, **__: object) -> None:
    """Models of this benchmark are made on the node."""


async def _fail(name: str, error: errors.OstinatoError) -> NoReturn:
    raise error
