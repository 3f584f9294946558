"""HTTP answers as views, events and the classes of errors.py; and helpers that write calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from controlplane import errors
from controlplane.errors import OstinatoError, Unavailable, error_from_body

if TYPE_CHECKING:
    from controlplane.management.schemas.models import OperationView

DEFAULT_URL = "http://127.0.0.1:8000"
LONGEST_PAUSE_S = 30.0  # the client does not wait longer; the caller gets the error

M = TypeVar("M", bound=BaseModel)


def network_message(url: httpx.URL, failure: httpx.TransportError) -> str:
    """The message for a network failure of a call to `url`, printed without its password."""
    url = url.copy_with(username=None, password=None)
    if isinstance(failure, httpx.ConnectError) and "SSL" in str(failure):
        return (
            f"the TLS connection to {url} failed ({failure}); use http:// in the URL if the server has no TLS"
        )
    if isinstance(failure, httpx.ConnectError | httpx.ConnectTimeout):
        return (
            f"no server answers at {url}; start Ostinato with `ostinato up`, or give its address with --url"
        )
    if isinstance(failure, httpx.TimeoutException):
        return f"{url} did not answer in time; look at `ostinato status`, then try again"
    return f"the connection to {url} broke off ({failure}); try again"


def checked_url(text: str) -> httpx.URL:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as failure:
        raise errors.InvalidRequest(
            f"expected a URL such as {DEFAULT_URL}, got {text!r} ({failure})", param="url"
        ) from failure
    if url.scheme not in {"http", "https"} or not url.host:
        raise errors.InvalidRequest(f"expected a URL such as {DEFAULT_URL}, got {text!r}", param="url")
    if url.port is not None and not 0 < url.port < 65_536:
        raise errors.InvalidRequest(
            f"expected a port from 1 to 65535 in the URL, got {url.port}", param="url"
        )
    return url


def path_part(name: str) -> str:
    """A name in a path. Raises InvalidRequest for a name that would change the path."""
    if not isinstance(name, str) or any(part in ("", ".", "..") for part in name.split("/")):
        raise errors.InvalidRequest(f"expected a name, got {name!r}; `ostinato models` lists them")
    try:
        return quote(name, safe="/")
    except UnicodeEncodeError as failure:
        raise errors.InvalidRequest(
            f"expected a name in UTF-8, got {name!r}; write the name in UTF-8"
        ) from failure


def body_of(request: BaseModel) -> dict[str, Any]:
    return request.model_dump(mode="json", exclude_none=True)


def pause_of(error: Unavailable, attempt: int) -> float | None:
    """The pause before the next attempt; None: do not try again."""
    if error.details.get("reachable") is False:
        return 0.1 * 2.0 ** (attempt - 1)
    if error.retry_after_s is None or error.retry_after_s > LONGEST_PAUSE_S:
        return None
    return error.retry_after_s


def parse(cls: type[M], response: httpx.Response) -> M:
    return validated(cls, response.text)


def validated(cls: type[M], text: str) -> M:
    try:
        return cls.model_validate_json(text)
    except ValidationError as failure:
        problem = failure.errors()[0]
        raise OstinatoError(
            f"the server's answer is not a valid {cls.__name__} ({problem['loc']}: {problem['msg']}); "
            "use a client and a server of the same version"
        ) from failure


# Server-sent events


def lines_of(chunks: Iterable[str]) -> Iterator[str]:
    """Lines, ended by newlines only: str.splitlines also splits at characters that JSON leaves raw."""
    rest = ""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split("\n")
        for line in lines:
            yield line.removesuffix("\r")


def events_of(lines: Iterable[str]) -> Iterator[str]:
    data: list[str] = []
    for line in lines:
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            yield "\n".join(data)
            data = []


def chunk_of(data: str) -> dict[str, Any]:
    """One chunk of an OpenAI stream. Raises the error that the data contains, or EngineFailed."""
    try:
        chunk = json.loads(data)
        if "error" in chunk:
            raise error_from_body(chunk)
        if not isinstance(chunk["choices"], list):
            raise TypeError("expected choices to be a list")
    except (ValueError, KeyError, TypeError) as failure:
        raise errors.EngineFailed(
            f"expected a chunk of an answer from the server, got {data[:200]!r}; try again"
        ) from failure
    return dict(chunk)


def answer_of(text: str) -> dict[str, Any]:
    """An OpenAI answer that is not streamed. Raises EngineFailed."""
    try:
        answer = json.loads(text)
        if not answer["choices"]:
            raise TypeError("no choices")
    except (ValueError, KeyError, TypeError) as failure:
        raise errors.EngineFailed(
            f"expected an answer with choices from the server, got {text[:200]!r}; try again"
        ) from failure
    return dict(answer)


def text_of(chunk: Mapping[str, Any]) -> str:
    """The text that a chat chunk adds. Raises EngineFailed."""
    try:
        choices = chunk["choices"]
        return (choices[0]["delta"].get("content") or "") if choices else ""
    except (KeyError, TypeError, AttributeError, IndexError) as failure:
        raise errors.EngineFailed(
            f"expected a chunk of a chat answer from the server, got {str(chunk)[:200]}; try again"
        ) from failure


def finish_of(chunk: Mapping[str, Any]) -> str | None:
    """The reason why an answer ended; None in chunks without a reason."""
    choices = chunk.get("choices") or [{}]
    reason = choices[0].get("finish_reason")
    return None if reason is None else str(reason)


# Errors


def error_of(operation: OperationView) -> OstinatoError:
    """The error of a failed operation."""
    return error_from_body(operation.error or {"message": operation.reason})


def checked(response: httpx.Response) -> httpx.Response:
    if response.is_success:
        return response
    retry_after_s = _retry_after_s(response)
    try:
        body = response.json()
    except ValueError:
        body = None
    if isinstance(body, dict) and isinstance(body.get("error"), dict):
        raise error_from_body(body, retry_after_s)
    cls = {429: errors.Overloaded, 503: Unavailable}.get(response.status_code, OstinatoError)
    where = f"{response.request.method} {response.request.url.path}"
    raise cls(
        f"{where} was answered with status {response.status_code} ({response.text[:200].strip()}); check "
        "that this is the URL of an Ostinato server",
        details={"status": response.status_code},
        retry_after_s=retry_after_s,
    )


def _retry_after_s(response: httpx.Response) -> float | None:
    try:
        return max(float(response.headers["Retry-After"]), 0.0)
    except (KeyError, ValueError):
        return None
