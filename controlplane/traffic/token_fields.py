"""The request fields of vLLM's calls that use a model's tokenizer alone. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from controlplane.traffic.field_checks import Check, anything, boolean, integer, listed, text
from controlplane.traffic.openai_fields import CHAT_FIELDS

_OF_CHATS = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "chat_template",
    "mm_processor_kwargs",
    "media_io_kwargs",
)

TOKENIZE_FIELDS: Mapping[str, Check] = {
    "model": anything,  # `parse_body` has read it before
    "prompt": text(2**31 - 1),
    **{name: CHAT_FIELDS[name] for name in _OF_CHATS},
    "add_special_tokens": boolean,
    "return_token_strs": boolean,
}
DETOKENIZE_FIELDS: Mapping[str, Check] = {
    "model": anything,
    "tokens": listed(integer(0, 2**31 - 1)),
}
