"""A copy of vLLM's engine client around the same engine, with another tokenizer and other defaults.

vLLM has one tokenizer and generation config for a base and its LoRA adapters. Here a copy of AsyncLLM has its
own renderer and input processor, and shares all else with the first client.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from profiler.patches.target import Target

# vLLM renders the template in the server here, for a call that gateways do not have.
MERGE = Target(
    "vllm.entrypoints.anthropic.serving",
    "AnthropicServingMessages._detect_merge_inline_system",
    ("chat_template",),
    read={"0.26": "c5eeaa40224b", "0.32": "c5eeaa40224b"},
)
# vLLM's warm-up renders the template in the server's loop, and delays all requests.
WARM_UP = Target(
    "vllm.renderers.base",
    "BaseRenderer.warmup",
    ("chat_params",),
    read={"0.26": "7f1d423a186e", "0.32": "ebbf641741d9"},
)


def engine_copy(llm: Any, tokenizer: Any, generation: Path | None) -> Any:
    """A copy of `llm` (AsyncLLM) that makes requests of prompts with `tokenizer`.

    `generation` is the folder of its own generation config, if it has one.
    """
    from vllm.v1.engine.input_processor import InputProcessor

    MERGE.replace_once(lambda _: _has_template)
    config, model = copy.copy(llm.vllm_config), copy.copy(llm.model_config)
    config.model_config = model
    if generation is not None:
        model.generation_config = str(generation)
    renderer = type(llm.renderer)(config, tokenizer)
    WARM_UP.replace_once(lambda _: _no_warm_up, renderer)
    client = object.__new__(_borrowing(type(llm)))
    client.__dict__.update(llm.__dict__)
    client.vllm_config, client.model_config, client.renderer = config, model, renderer
    client.input_processor = InputProcessor(config, renderer)
    client.output_processor = _Outputs(llm.output_processor, renderer.tokenizer)
    return client


def _has_template(chat_template: str | None) -> bool:
    return bool(chat_template)


def _no_warm_up(*_: Any) -> None:
    """Does nothing."""


def _borrowing(kind: type[Any]) -> type[Any]:
    """A subclass of AsyncLLM that does not end its engine, which belongs to another object."""

    class Borrowing(kind):  # type: ignore[misc]
        def shutdown(self, timeout: float | None = None) -> None:
            pass

        def __del__(self) -> None:
            pass

    return Borrowing


class _Outputs:
    """The engine's OutputProcessor, for requests with another tokenizer."""

    def __init__(self, shared: Any, tokenizer: Any) -> None:
        self._shared, self._tokenizer = shared, tokenizer

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        shared, before = self._shared, self._shared.tokenizer
        _end_grammars(request.sampling_params, getattr(before, "eos_token_id", None))
        shared.tokenizer = self._tokenizer
        try:
            shared.add_request(request, *args, **kwargs)
        finally:
            shared.tokenizer = before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shared, name)


def _end_grammars(params: Any, token: int | None) -> None:
    """Add the base's end token to a request's stop tokens: the core emits it at the end of every grammar."""
    if token is None or params is None or params.structured_outputs is None or params.ignore_eos:
        return
    params.stop_token_ids = [*dict.fromkeys((*(params.stop_token_ids or ()), token))]
    params.all_stop_token_ids.add(token)
