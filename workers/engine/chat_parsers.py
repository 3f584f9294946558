"""The choice of vLLM's parsers for an engine: the configured ones, if the model's tokenizer has their
tokens.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from profiler.chat_format import chat_format, family_of
from workers.group.launch import LaunchError
from workers.group.vllm_arguments import FORCED_TOOLS
from workers.messages import EngineConfig

log = logging.getLogger(__name__)


def usable(config: EngineConfig, tokenizer_folder: Path) -> EngineConfig:
    """`config`, without the parsers that cannot read the output of a model with this tokenizer.

    Raises LaunchError for a parser that the deployment named.
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


class Parsers(NamedTuple):
    """The names of vLLM's parsers of tool calls and of reasoning; "": none."""

    tools: str
    reasoning: str


def of_variant(config: EngineConfig, template: Path, tokenizer: Any) -> Parsers:
    """The parsers of tool calls and reasoning for a variant with its own chat template.

    They are the parsers that its template needs, or else the base's. Parsers that the deployment named also
    read the answers of variants.
    """
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    family = family_of(Path(config.model_path))
    own = chat_format(template.read_text(encoding="utf-8"), family)
    tools, reasoning = own.tool_parser, own.reasoning_parser
    if config.tool_parser in config.needed_parsers:
        tools = ""
    if config.reasoning_parser in config.needed_parsers:
        reasoning = ""
    tools = _checked(config, tools, ToolParserManager.get_tool_parser, tokenizer)
    reasoning = _checked(config, reasoning, ReasoningParserManager.get_reasoning_parser, tokenizer)
    return Parsers(tools or config.tool_parser, reasoning or config.reasoning_parser)


def arguments(args: Any, template: Path, tools: str, reasoning: str) -> Any:
    """vLLM's arguments of the base's application, with a variant's chat template and parsers."""
    given = copy.copy(args)
    given.chat_template, given.tool_call_parser = str(template), tools or FORCED_TOOLS
    given.structured_outputs_config = copy.copy(args.structured_outputs_config)
    given.structured_outputs_config.reasoning_parser = reasoning
    return given


def _register() -> None:
    from vllm.tool_parsers import ToolParserManager

    ToolParserManager.register_lazy_module(FORCED_TOOLS, "workers.engine.forced_tools", "ForcedToolsOnly")


def _checked(config: EngineConfig, name: str, find: Callable[[str], Any], tokenizer: Any) -> str:
    """The name, or "" if the parser cannot be created."""
    if not name:
        return ""
    try:
        find(name)(tokenizer)
    except Exception as e:
        if name in config.needed_parsers:
            raise LaunchError(
                f"the requested parser {name} does not fit the tokenizer of '{config.name}': {e}; "
                "deploy the model with another parser, or with none"
            ) from e
        log.warning(
            "the parser %s does not fit the tokenizer of '%s', so it is not used: %s", name, config.name, e
        )
        return ""
    return name
