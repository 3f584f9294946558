"""Grammars are validated elsewhere, before a request reaches vLLM.

vLLM validates a grammar on the event loop of its server, where one large schema stops every stream. Here each
request with a grammar first awaits a check of ours, which takes the validation's place.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from profiler.patches.target import Target

ADD = Target(
    "vllm.v1.engine.async_llm",
    "AsyncLLM.add_request",
    ("request_id", "prompt", "params"),
    read={"0.26": "6fcefb648275", "0.32": "6f592692b992"},
)
VALIDATE = Target(
    "vllm.sampling_params",
    "SamplingParams._validate_structured_outputs",
    read={"0.26": "bc7f9e7d4dbc", "0.32": "7a918e8ce7c5"},
)
_CHECK, _CHECKED = "_ostinato_check", "_ostinato_checked"

Check = Callable[[Any, Any], Awaitable[None]]


def install(llm: Any, check: Check) -> None:
    """Make every request of this AsyncLLM, and of copies of it, await `check(its prompt, its grammar)`.

    `check` gets vLLM's StructuredOutputsParams as the grammar. It changes them as vLLM's validation does, and
    raises vLLM's error for a request.
    """
    setattr(llm, _CHECK, check)
    ADD.replace_once(_checking)
    VALIDATE.replace_once(_validating)


def _checking(add_request: Callable[..., Any]) -> Callable[..., Any]:
    async def checked_request(
        self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        check: Check | None = getattr(self, _CHECK, None)
        outputs = getattr(params, "structured_outputs", None)  # requests for embeddings have none
        given = outputs is not None and not outputs.all_constraints_none()
        if (
            check is not None and given and not getattr(outputs, _CHECKED, False)
        ):  # beams of a search share one
            await check(prompt, outputs)
            setattr(outputs, _CHECKED, True)
        return await add_request(self, request_id, prompt, params, *args, **kwargs)

    return checked_request


def _validating(validate: Callable[..., None]) -> Callable[..., None]:
    def validated(self: Any, *args: Any) -> None:
        if not getattr(self.structured_outputs, _CHECKED, False):
            validate(self, *args)

    return validated
