"""Which of vLLM's parsers an engine runs with: those it was given, as far as the model's tokenizer has their
words."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from workers.group.launch import LaunchError
from workers.group.vllm_arguments import FORCED_TOOLS
from workers.messages import EngineConfig

log = logging.getLogger(__name__)


def usable(config: EngineConfig, tokenizer_folder: Path) -> EngineConfig:
    """`config`, without the parsers that cannot read what a model with this tokenizer writes.

    Raises LaunchError for one that whoever deployed the model asked for.
    """
    _register()
    if not config.tool_parser and not config.reasoning_parser:
        return config
    from vllm.reasoning import ReasoningParserManager
    from vllm.tokenizers import get_tokenizer
    from vllm.tool_parsers import ToolParserManager

    tokenizer = get_tokenizer(str(tokenizer_folder))
    tools = _checked(config, config.tool_parser, ToolParserManager.get_tool_parser, tokenizer)
    reasoning = _checked(
        config, config.reasoning_parser, ReasoningParserManager.get_reasoning_parser, tokenizer
    )
    return replace(config, tool_parser=tools, reasoning_parser=reasoning)


def _register() -> None:
    from vllm.tool_parsers import ToolParserManager

    ToolParserManager.register_lazy_module(FORCED_TOOLS, "workers.engine.forced_tools", "ForcedToolsOnly")


def _checked(config: EngineConfig, name: str, find: Callable[[str], Any], tokenizer: Any) -> str:
    """The name, or "" where the parser cannot be made."""
    if not name:
        return ""
    try:
        find(name)(tokenizer)
    except Exception as e:
        if name in config.needed_parsers:
            raise LaunchError(
                f"the parser {name} was asked for, and does not suit the tokenizer of '{config.name}': {e}; "
                "deploy it with another parser, or with none"
            ) from e
        log.warning(
            "parser %s does not suit the tokenizer of '%s', so it is left out: %s", name, config.name, e
        )
        return ""
    return name
