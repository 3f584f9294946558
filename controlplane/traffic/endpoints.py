"""The table of inference endpoints: one row for each call that goes to an engine. Pure.

Every call takes the path of ARCHITECTURE.md: key, tenant, fields, bounds, route, admission, engine, charge.
The engine's server has the call under the same path. To add an endpoint, add its row here, its fields in a
module of this folder, and its schema for the documentation in `controlplane/api/routes/inference.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from controlplane.traffic.field_checks import Check
from controlplane.traffic.messages_fields import COUNT_FIELDS, MESSAGES_FIELDS
from controlplane.traffic.openai_fields import CHAT_FIELDS, COMPLETION_FIELDS
from controlplane.traffic.responses_fields import RESPONSES_FIELDS
from controlplane.traffic.token_fields import DETOKENIZE_FIELDS, TOKENIZE_FIELDS

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"

# Tokenizing this many bytes, and writing the ids, takes an engine's server about as long as a large chat.
_TOKENIZED_BYTES = 1 << 20


class Format(Enum):
    """The API that an endpoint belongs to, which says how its errors and its stream's events are written."""

    OPENAI = auto()
    RESPONSES = auto()
    ANTHROPIC = auto()


@dataclass(frozen=True)
class Endpoint:
    """`fields`: what a body may hold; the call streams if one of them is `stream`.

    `lengths`: the fields that limit an answer's length; the engine uses the first one that is given. Without
    them an answer has `default_length` tokens (None: the context's rest). An endpoint without such fields
    generates no token: it reads no KV block, and is charged none of the tenant's tokens.

    `body_bytes`: the most bytes of a body, if fewer than the installation allows.
    """

    fields: Mapping[str, Check]
    lengths: tuple[str, ...] = ()
    default_length: int | None = None
    format: Format = Format.OPENAI
    body_bytes: int | None = None

    @property
    def generates(self) -> bool:
        return bool(self.lengths)


ENDPOINTS: Mapping[str, Endpoint] = {
    CHAT: Endpoint(CHAT_FIELDS, ("max_completion_tokens", "max_tokens")),
    COMPLETIONS: Endpoint(COMPLETION_FIELDS, ("max_tokens",), default_length=16),
    RESPONSES: Endpoint(RESPONSES_FIELDS, ("max_output_tokens",), format=Format.RESPONSES),
    MESSAGES: Endpoint(MESSAGES_FIELDS, ("max_tokens",), format=Format.ANTHROPIC),
    COUNT_TOKENS: Endpoint(COUNT_FIELDS, format=Format.ANTHROPIC),
    TOKENIZE: Endpoint(TOKENIZE_FIELDS, body_bytes=_TOKENIZED_BYTES),
    DETOKENIZE: Endpoint(DETOKENIZE_FIELDS, body_bytes=_TOKENIZED_BYTES),
}


def format_of(path: str) -> Format:
    """The API of a path; OpenAI's for every path that is not in the table."""
    endpoint = ENDPOINTS.get(path)
    return Format.OPENAI if endpoint is None else endpoint.format
