"""Errors with the field names of the caller's request.

Other calls carry out `POST /inference_model` and vLLM's adapter calls, and name their fields differently. The
errors name the fields that the caller sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from controlplane import errors

# The engine's fields, with their names in `POST /inference_model`.
INFERENCE: Mapping[str, str] = {
    "messages": "inputText",
    "prompt": "inputText",
    "input_tokens": "inputText",
    "max_tokens": "maxOutputLength",
    "max_completion_tokens": "maxOutputLength",
    "top_p": "topP",
}
# The fields of registering and deploying, with their names in vLLM's adapter calls.
ADAPTERS: Mapping[str, str] = {"adapter": "lora_path", "base": "base_model_name", "model": "lora_name"}


@contextmanager
def spoken_of_as(names: Mapping[str, str]) -> Iterator[None]:
    """Within this block errors that name one of `names` use the caller's name for it."""
    try:
        yield
    except errors.OstinatoError as e:
        raise translated(e, names) from e


def translated(error: errors.OstinatoError, names: Mapping[str, str]) -> errors.OstinatoError:
    own = names.get(error.param or "", error.param)
    message = _in_code(error.message, names)
    if own == error.param and message == error.message:
        return error
    told = error.saying(message)
    told.param = own
    return told


def _in_code(message: str, names: Mapping[str, str]) -> str:
    """Fields in a message: at its beginning before a colon, in backticks, or as vLLM names them."""
    any_of = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    as_field = re.compile(rf"^({any_of})(?=:)|(?<=`)({any_of})(?=`)|(?<=parameter=)({any_of})(?=[,)])")
    return as_field.sub(lambda found: names[found[0]], message)
