"""Checks of request fields: what a client may send to an engine, field by field. Pure.

The engine's server accepts more than a client should be allowed: arguments for a tokenizer, KV blocks of
other requests, files of pictures. So each endpoint (`endpoints.py`) lists its fields, with their valid values
or the reason for their refusal. A field that is not in the list is refused by its name. Null means that a
field is absent. `tests/api/test_request_fields.py` compares these lists with vLLM's own models, for each
version we support. The limits of a request as a whole are in `controlplane/api/request_bounds.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from controlplane import errors
from controlplane.template_arguments import TEMPLATE_ARGUMENTS
from controlplane.traffic.endpoints import ENDPOINTS
from controlplane.traffic.field_checks import Check, scalar, shown, unexpected
from controlplane.traffic.openai_fields import LONGEST_NAME, LONGEST_WORD


def check_fields(
    path: str, body: Mapping[str, Any], template_arguments: Collection[str] = TEMPLATE_ARGUMENTS
) -> None:
    """Errors: InvalidRequest, naming the field, if it is unknown or refused, or if its value is invalid."""
    fields = ENDPOINTS[path].fields
    for name, value in body.items():
        check = fields.get(name)
        if check is None:
            raise _unknown(path, name, fields)
        if value is not None:
            check(name, value)
    if body.get("chat_template_kwargs") is not None:
        _check_template_arguments(body["chat_template_kwargs"], template_arguments)


def _check_template_arguments(given: Any, allowed: Collection[str]) -> None:
    name = "chat_template_kwargs"
    if type(given) is not dict:
        raise unexpected(name, "an object", given)
    for key, value in given.items():
        if key not in allowed:
            raise errors.InvalidRequest(
                f"{name}: a request may set the template variables {', '.join(sorted(allowed))}; got "
                f"{shown(key)} (OSTINATO_TEMPLATE_ARGUMENTS allows more variables)",
                param=name,
            )
        if value is not None:
            scalar(LONGEST_WORD)(f"{name}.{key}", value)


def _unknown(path: str, name: str, fields: Mapping[str, Check]) -> errors.InvalidRequest:
    near = difflib.get_close_matches(name[:LONGEST_NAME], fields, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return errors.InvalidRequest(f"{path} has no field {shown(name)}{hint}", param=name[:LONGEST_NAME])


def output_limit(path: str, body: Mapping[str, Any]) -> int | None:
    """Tokens of the longest answer, by the field that the engine uses; None: not given."""
    return next((body[name] for name in ENDPOINTS[path].lengths if type(body.get(name)) is int), None)
