"""A request's terms: from its headers and body, else from its deployment's targets.

Pure. docs/slos.md lists the headers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from controlplane import errors
from controlplane.state.records import ServingTargets
from controlplane.state.terms import EXPECTED_OUTPUT_TOKENS, MAX_TARGET_MS, LatePolicy, Priority
from controlplane.traffic.endpoints import ENDPOINTS
from controlplane.traffic.request_fields import output_limit
from controlplane.traffic.tenants import DEFAULT, Tenant

PREFIX = b"x-ostinato-"
MAX_PROMPT_LOGPROBS = 4096  # an engine answers no request while it writes them, for about 80 ms
TTFT = "x-ostinato-ttft-ms"
TPOT = "x-ostinato-tpot-ms"
DEADLINE = "x-ostinato-deadline-ms"
PRIORITY = "x-ostinato-priority"
LATE = "x-ostinato-late"
SESSION = "x-ostinato-session"
HEADERS = (TTFT, TPOT, DEADLINE, PRIORITY, LATE, SESSION)
# The names of llm-d's endpoint picker.
ALIASES = {"x-slo-ttft-ms": TTFT, "x-slo-tpot-ms": TPOT}
_PREFIXES = (PREFIX, b"x-slo-")

# OpenAI's field; the other tiers (auto, default, scale) mean the deployment's priority.
_SERVICE_TIERS = {"flex": Priority.LOW, "priority": Priority.HIGH}
MAX_SESSION = 256
BYTES_PER_TOKEN = 4
# The assumed tokens of an answer without a limit, until it has ended: usually the answer is much shorter.
UNLIMITED_TOKENS = EXPECTED_OUTPUT_TOKENS
# Characters of a prompt that make its beginning; a prompt with less than a quarter of them has no beginning.
BEGINNING = 4096
# Fields with the beginning of a prompt, of all endpoints.
_OPENINGS = ("system", "instructions", "messages", "prompt", "input")
_MAX_SHOWN = 100

Headers = Iterable[tuple[bytes, bytes]]


class RequestTerms(NamedTuple):
    """Times are from the request's arrival at the gateway; None: no target.

    Requests of one conversation share a `session`, or "". `tokens` is the expected cost: estimated tokens of
    its prompt and of its longest answer; `prompt_tokens` of them are the prompt's. `beginning` is a hash of
    the prompt's beginning with the model's name and the tenant's salt, because prefix caches depend on these;
    0: too short. The request has `sequences` answers (of all prompts together), and takes as many places.
    Answers that are not `limited` end with the context.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    deadline_s: float | None = None
    priority: Priority = Priority.NORMAL
    late: LatePolicy = LatePolicy.FINISH
    tenant: Tenant = DEFAULT
    session: str = ""
    tokens: int = 1
    prompt_tokens: int = 1
    beginning: int = 0
    sequences: int = 1
    limited: bool = True

    @property
    def output_limit(self) -> int:
        """Tokens of the longest answer; 0: as many as the context has room for."""
        return max(0, self.tokens - self.prompt_tokens) // self.sequences if self.limited else 0

    @property
    def dropped_after_s(self) -> float | None:
        """Seconds without a first token after which the request is dropped; None: never. After its deadline a
        request is dropped in any case."""
        if self.late is LatePolicy.FINISH:
            return None
        return min((limit for limit in (self.ttft_s, self.deadline_s) if limit is not None), default=None)


NO_TERMS = RequestTerms()


def request_terms(
    headers: Headers,
    body: Mapping[str, Any],
    targets: ServingTargets,
    tenant: Tenant = DEFAULT,
    tokens: int = 1,
    prompt_tokens: int = 1,
    limited: bool = True,
) -> RequestTerms:
    """The terms of a request. `headers` as in ASGI: names in lower case. Invalid fields of `body` are ignored
    here, because the engine refuses them.

    Errors: InvalidRequest, naming the header, if it is unknown, unreadable, given twice, or beyond the
    tenant's limits.
    """
    given = _ours(headers)
    ttft_s, tpot_s, deadline_s = targets.ttft_s, targets.tpot_s, targets.deadline_s
    if given:  # usually there are none
        ttft_s = _seconds(TTFT, given, ttft_s)
        tpot_s = _seconds(TPOT, given, tpot_s)
        deadline_s = _seconds(DEADLINE, given, deadline_s)
    priority = _priority(given, body, targets.priority or Priority.NORMAL, tenant)
    late = _late(given, targets.late)
    session = given.get(SESSION)
    return RequestTerms(
        ttft_s,
        tpot_s,
        deadline_s,
        priority,
        late,
        tenant,
        _body_session(body) if session is None else _session(session),
        max(tokens, 1),
        max(prompt_tokens, 1),
        _beginning(body, tenant.cache_salt),
        sequences_of(body),
        limited,
    )


def cut_at(path: str, body: Mapping[str, Any], most: int | None) -> int | None:
    """Tokens at which each answer is cut: the request's limit, in the field that the engine uses on this
    path, but at most `most`, the deployment's limit. None: at the context's end. 0: the call generates
    nothing."""
    if not ENDPOINTS[path].generates:
        return 0
    limits = [limit for limit in (output_limit(path, body), most) if limit is not None]
    return min(limits, default=None)


def estimated_tokens(
    body_bytes: int, body: Mapping[str, Any], limit: int | None, context: int | None = None
) -> int:
    """Tokens of the prompt, by its bytes, and of the requested answers, each of at most `limit` tokens."""
    longest = UNLIMITED_TOKENS if limit is None else max(0, limit)
    if context is not None:
        longest = min(longest, context)
    return estimated_prompt(body_bytes) + sequences_of(body) * longest


def sequences_of(body: Mapping[str, Any]) -> int:
    """The number of answers: choices times prompts."""
    if "n" not in body and "prompt" not in body:
        return 1
    return choices_of(body) * len(prompts_of(body))


def choices_of(body: Mapping[str, Any]) -> int:
    """The number of answers for each prompt."""
    choices = body.get("n")
    return choices if type(choices) is int and choices > 1 else 1


def prompts_of(body: Mapping[str, Any]) -> list[Any]:
    """The prompts; one element even for messages or an empty list."""
    prompts = body.get("prompt")
    if not isinstance(prompts, list) or not prompts or isinstance(prompts[0], int):
        return [prompts]  # a list of numbers is the token ids of one prompt
    return prompts


def estimated_prompt(body_bytes: int) -> int:
    """Estimated tokens of a prompt, 1 or more."""
    return max(1, body_bytes // BYTES_PER_TOKEN)


def _beginning(body: Mapping[str, Any], salt: str) -> int:
    """A hash of the beginning of the prompt: its instructions, if there are any, or else its first
    message."""
    text = next((text for name in _OPENINGS if (text := _text(body.get(name)))), "")
    if len(text) < BEGINNING // 4:
        return 0
    return hash((body.get("model"), text[:BEGINNING], salt))


def _text(value: Any) -> str:
    """A text, or the text of the first of messages, items or blocks; "": none."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        first = value[0]
        value = first.get("content", first.get("text"))
    return value if isinstance(value, str) else ""


def _ours(headers: Headers) -> dict[str, str]:
    """The headers about terms, by their names here.

    Errors: InvalidRequest.
    """
    given: dict[str, str] = {}
    for raw, value in headers:
        if not raw.startswith(_PREFIXES):
            continue
        spelt = raw.decode("latin-1")
        name = ALIASES.get(spelt, spelt)
        if name not in HEADERS:
            if not raw.startswith(PREFIX):
                continue  # another system's header
            raise _refused(spelt, f"one of {', '.join(HEADERS)}", spelt)
        if name in given:
            raise _refused(spelt, "this header once", "twice")
        given[name] = value.decode("latin-1").strip()
    return given


def _seconds(name: str, given: Mapping[str, str], target_s: float | None) -> float | None:
    text = given.get(name)
    if text is None:
        return target_s
    try:
        value_ms = math.nan if "_" in text else float(text)
    except ValueError:
        value_ms = math.nan
    if not 0 < value_ms <= MAX_TARGET_MS:
        raise _refused(name, f"milliseconds above 0, at most {MAX_TARGET_MS:.0f}", text)
    return value_ms / 1000


def _priority(
    given: Mapping[str, str], body: Mapping[str, Any], default: Priority, tenant: Tenant
) -> Priority:
    """The priority. A default above the tenant's limit is lowered; a request for more is refused."""
    highest = tenant.max_priority
    name, wish = _wish(given, body)
    if wish is None:
        if highest is Priority.HIGH:
            return default
        return default if default.level <= highest.level else highest
    if wish.level > highest.level:
        raise _refused(name, f"at most {highest}, the highest priority of tenant '{tenant.name}'", wish)
    return wish


def _wish(given: Mapping[str, str], body: Mapping[str, Any]) -> tuple[str, Priority | None]:
    """The requested priority and its source: our header, OpenAI's field, or vLLM's."""
    if (text := given.get(PRIORITY)) is not None:
        if text not in list(Priority):
            raise _refused(PRIORITY, f"one of {', '.join(Priority)}", text)
        return PRIORITY, Priority(text)
    tier = body.get("service_tier")
    if isinstance(tier, str) and tier in _SERVICE_TIERS:
        return "service_tier", _SERVICE_TIERS[tier]
    number = body.get("priority")
    if type(number) is int and number:  # vLLM's: the lowest number goes first, and 0 means no wish
        return "priority", Priority.HIGH if number < 0 else Priority.LOW
    return "", None


def _late(given: Mapping[str, str], target: LatePolicy | None) -> LatePolicy:
    text = given.get(LATE)
    if text is None:
        return target or LatePolicy.FINISH
    if text not in list(LatePolicy):
        raise _refused(LATE, f"one of {', '.join(LatePolicy)}", text)
    return LatePolicy(text)


def _session(text: str) -> str:
    if not 1 <= len(text) <= MAX_SESSION or not text.isprintable():
        raise _refused(SESSION, f"1 to {MAX_SESSION} printable characters", text)
    return text


def _body_session(body: Mapping[str, Any]) -> str:
    """OpenAI's key for requests with the same beginning, as the session."""
    key = body.get("prompt_cache_key")
    return key if isinstance(key, str) and len(key) <= MAX_SESSION else ""


def _refused(name: str, expected: str, got: str) -> errors.InvalidRequest:
    return errors.InvalidRequest(f"{name}: expected {expected}; got {got[:_MAX_SHOWN]!r}", param=name)
