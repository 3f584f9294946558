"""vLLM's OpenAI application for a base, and copies of it for variants with their own text files."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.engine import chat_parsers
from workers.engine.template_turns import take_turns
from workers.messages import EngineConfig
from workers.patches.vllm import app_state


@dataclass(frozen=True)
class ApplicationMaker:
    """Makes copies of `app`, the base's application with the arguments `args`.

    `vllm` is vLLM's entry points by name, `tasks` what the model can do.
    """

    vllm: dict[str, Any]
    config: EngineConfig
    args: Any
    tasks: Any
    app: Any

    @classmethod
    async def of_base(
        cls, vllm: dict[str, Any], config: EngineConfig, args: Any, llm: Any
    ) -> ApplicationMaker:
        """Make the base's application around the engine client `llm`."""
        take_turns(llm.renderer)
        tasks = await llm.get_supported_tasks()
        maker = cls(vllm, config, args, tasks, vllm["build_app"](args, tasks, llm.model_config))
        await maker._prepare(maker.app, llm, args)
        return maker

    async def for_variant(self, client: Any, template: Path | None) -> Any:
        """The application of a variant with the engine client `client` and, if it has one, its own template.

        A template may need another reasoning parser than the base's. A second copy with the base's parser
        then answers chats that a grammar forces.
        """
        take_turns(client.renderer)
        if template is None:
            return await self._copy(client, self.args)
        parsers = chat_parsers.of_variant(self.config, template, client.renderer.tokenizer)
        made = await self._copy(client, chat_parsers.arguments(self.args, template, *parsers))
        base = self.config.reasoning_parser
        if parsers.reasoning != base:
            plain = chat_parsers.arguments(self.args, template, parsers.tools, base)
            app_state.answer_by_grammar(made.state, (await self._copy(client, plain)).state)
        return made

    async def _copy(self, client: Any, args: Any) -> Any:
        """A copy of the base's application with its own state; it finds variants in the shared table."""
        made = copy.copy(self.app)
        made.state = type(self.app.state)()
        await self._prepare(made, client, args)
        app_state.resolve_in(made.state, self.app.state.openai_serving_models.lora_requests)
        return made

    async def _prepare(self, app: Any, client: Any, args: Any) -> None:
        await self.vllm["init_app_state"](client, app.state, args, self.tasks)
        app_state.keep_running(app.state)
        app_state.mend_streams(app.state)
