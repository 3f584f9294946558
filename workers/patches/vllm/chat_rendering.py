"""Chats are rendered where their tenants have turns, instead of in vLLM's one thread."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

from profiler.patches.target import Target

# `prompt_extras` has the cache salt of the request.
CHAT = Target(
    "vllm.renderers.base",
    "BaseRenderer.render_chat_async",
    ("conversations", "chat_params", "prompt_extras"),
    read={"0.26": "8fa0b1517531", "0.32": "40e2411a9ff6"},
)
# The call of `safe_apply_chat_template` in the renderer's thread.
APPLY = Target(
    "vllm.renderers.hf",
    "HfRenderer._apply_chat_template_async",
    read={"0.26": "e7f23ab01026", "0.32": "e7f23ab01026"},
)

_RENDER = "apply_chat_template"
_salt: ContextVar[str | None] = ContextVar("salt", default=None)


def install(renderer: Any, render: Callable[[str | None, Callable[[], Any]], Awaitable[Any]]) -> None:
    """Make this renderer call `render(salt, apply)` for each chat. Renderers without templates stay as they
    are."""
    from vllm.renderers import hf

    if not isinstance(renderer, hf.HfRenderer):
        return

    async def applied(*args: Any, **kwargs: Any) -> Any:
        return await render(_salt.get(), partial(hf.safe_apply_chat_template, *args, **kwargs))

    _render_without_copies(type(renderer.tokenizer))
    APPLY.replace_once(lambda _: applied, renderer)
    CHAT.replace_once(_remembering, renderer)


def _render_without_copies(tokenizer: type) -> None:
    """Render with the tokenizer itself. vLLM takes a copy for each concurrent call, of up to 100 MB, and the
    server waits while it is made. Only tokenizing needs a copy.
    """
    from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin

    if issubclass(tokenizer, ThreadSafeHFTokenizerMixin) and _RENDER in vars(tokenizer):
        delattr(tokenizer, _RENDER)


def _remembering(inner: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Remember the salt while the chat is rendered."""

    @wraps(inner)
    async def rendered(*args: Any, prompt_extras: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        token = _salt.set((prompt_extras or {}).get("cache_salt"))
        try:
            return await inner(*args, prompt_extras=prompt_extras, **kwargs)
        finally:
            _salt.reset(token)

    return rendered
