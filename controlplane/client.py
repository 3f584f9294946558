"""The REST API as typed calls. Errors come back as the classes of errors.py, found by their `code`."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from controlplane import errors
from controlplane.api.schemas import (
    DeploymentView,
    DeployModelRequest,
    InferenceModelRequest,
    InferenceModelResponse,
    ModelView,
    OperationView,
    RegisterModelRequest,
)
from controlplane.errors import OstinatoError, Unavailable, error_classes
from controlplane.records import Phase

DEFAULT_URL = "http://127.0.0.1:8000"
ATTEMPTS = 4  # of one call, in all
RECONNECTS = 30  # of one watch, since the operation last changed
LONGEST_PAUSE_S = 30.0  # a longer Retry-After is the caller's to wait for
STREAM_SILENCE_S = 60.0  # a watch silent for longer is opened anew

M = TypeVar("M", bound=BaseModel)


class DeviceView(BaseModel):
    node: str
    index: int
    kind: str
    totalBytes: int  # noqa: N815 - the API's spelling
    freeBytes: int  # noqa: N815


class EngineView(BaseModel):
    host: str
    status: str
    message: str
    replicas: int
    variants: list[str]


class StatusView(BaseModel):
    version: str
    revision: int
    devices: list[DeviceView]
    engines: list[EngineView]


class _Models(BaseModel):
    models: list[ModelView]


class _Deployments(BaseModel):
    deployments: list[DeploymentView]


class _Operations(BaseModel):
    operations: list[OperationView]


class Client:
    """Calls one Ostinato. Safe calls and calls that carry an Idempotency-Key are retried; others are not."""

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        timeout_s: float = 600.0,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = _checked_url(url or os.environ.get("OSTINATO_URL") or DEFAULT_URL)
        key = os.environ.get("OSTINATO_API_KEY", "") if api_key is None else api_key
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(30.0, connect=5.0),
            verify=self.url.scheme == "https",  # reading certificates that nobody asks for takes 50 ms
            trust_env=self.url.host not in {"127.0.0.1", "localhost", "::1"},  # no proxy to ourselves
        )
        self._answer_timeout = httpx.Timeout(timeout_s, connect=5.0)
        self._sleep = sleep
        self._clock = clock

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Models

    def register_model(self, request: RegisterModelRequest) -> OperationView:
        return _parse(OperationView, self._create("POST", "/register_model", request))

    def models(self) -> list[ModelView]:
        return _parse(_Models, self._get("/models")).models

    def model(self, name: str) -> ModelView:
        return _parse(ModelView, self._get(f"/models/{_part(name)}"))

    def delete_model(self, name: str) -> OperationView:
        return _parse(OperationView, self._create("DELETE", f"/models/{_part(name)}"))

    # Deployments

    def deploy_model(self, request: DeployModelRequest) -> OperationView:
        return _parse(OperationView, self._create("POST", "/deploy_model", request))

    def deployments(self) -> list[DeploymentView]:
        return _parse(_Deployments, self._get("/deployments")).deployments

    def deployment(self, name: str) -> DeploymentView:
        return _parse(DeploymentView, self._get(f"/deployments/{_part(name)}"))

    def undeploy(self, name: str) -> OperationView:
        return _parse(OperationView, self._create("DELETE", f"/deployments/{_part(name)}"))

    def logs(self, name: str, lines: int = 200) -> str:
        return self._get(f"/deployments/{_part(name)}/logs", lines=lines).text

    def status(self) -> StatusView:
        return _parse(StatusView, self._get("/status"))

    # Operations

    def operations(self) -> list[OperationView]:
        return _parse(_Operations, self._get("/operations")).operations

    def operation(self, operation_id: str) -> OperationView:
        return _parse(OperationView, self._get(f"/operations/{_part(operation_id)}"))

    def cancel(self, operation_id: str) -> OperationView:
        return _parse(OperationView, self._create("POST", f"/operations/{_part(operation_id)}/cancel"))

    def watch(self, operation_id: str) -> Iterator[OperationView]:
        """The operation as it is now and at each change, until it is done. A broken stream is opened anew."""
        return self._watch(operation_id, deadline_s=None)

    def wait(self, operation: OperationView | str, timeout_s: float | None = None) -> OperationView:
        """The finished operation; a failed one raises its error. Errors: TimeoutError."""
        operation_id = operation if isinstance(operation, str) else operation.id
        deadline_s = None if timeout_s is None else self._clock() + timeout_s
        for view in self._watch(operation_id, deadline_s):
            if view.phase == Phase.FAILED:
                raise error_of(view)
            if view.done:
                return view
            if self._is_past(deadline_s):
                break
        raise TimeoutError(f"operation {operation_id} is not done after {timeout_s} s; it goes on")

    # Inference

    def inference_model(self, request: InferenceModelRequest) -> InferenceModelResponse:
        with self._connected():
            response = self._http.post("/inference_model", json=_body(request), timeout=self._answer_timeout)
        return _parse(InferenceModelResponse, _checked(response))

    def chat_stream(
        self, model: str, messages: Sequence[Mapping[str, str]], **params: Any
    ) -> Generator[str, None, None]:
        """The answer's text as it is generated. Errors: also EngineFailed when it breaks off."""
        body = {**params, "model": model, "messages": list(messages), "stream": True}
        with self._stream("POST", "/v1/chat/completions", self._answer_timeout, json=body) as events:
            for data in events:
                if data == "[DONE]":
                    return
                yield _delta(data)
        raise errors.EngineFailed("the answer broke off before its end; ask again")

    # One call

    def _get(self, path: str, **params: int) -> httpx.Response:
        return self._retry(lambda: self._http.get(path, params=params))

    def _create(self, method: str, path: str, request: BaseModel | None = None) -> httpx.Response:
        """A call that changes something: its key lets the server recognise a repetition."""
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        body = None if request is None else _body(request)
        return self._retry(lambda: self._http.request(method, path, json=body, headers=headers))

    def _retry(self, send: Callable[[], httpx.Response]) -> httpx.Response:
        for attempt in range(1, ATTEMPTS):
            try:
                return self._send(send)
            except Unavailable as error:
                pause_s = _pause_s(error, attempt)
                if pause_s is None:
                    raise
            self._sleep(pause_s)
        return self._send(send)

    def _send(self, send: Callable[[], httpx.Response]) -> httpx.Response:
        with self._connected():
            response = send()
        return _checked(response)

    # Streams

    def _watch(self, operation_id: str, deadline_s: float | None) -> Iterator[OperationView]:
        seen: OperationView | None = None
        breaks, allowed = 0, ATTEMPTS - 1
        while True:
            try:
                for view in self._watch_once(operation_id, deadline_s):
                    if view != seen:
                        breaks, allowed = 0, RECONNECTS
                        yield view
                    seen = view
                    if view.done:
                        return
            except Unavailable:
                if breaks >= allowed:
                    raise
            if self._is_past(deadline_s):
                return
            breaks += 1
            if breaks > allowed:
                raise Unavailable(f"the news of operation {operation_id} keep breaking off; watch it again")
            self._sleep(min(0.1 * 2**breaks, 2.0))

    def _watch_once(self, operation_id: str, deadline_s: float | None) -> Iterator[OperationView]:
        left_s = STREAM_SILENCE_S if deadline_s is None else max(deadline_s - self._clock(), 0.001)
        timeout = httpx.Timeout(min(left_s, STREAM_SILENCE_S), connect=5.0)
        with self._stream("GET", f"/operations/{_part(operation_id)}/watch", timeout) as events:
            for data in events:
                yield _validated(OperationView, data)

    @contextmanager
    def _stream(
        self, method: str, path: str, timeout: httpx.Timeout, json: object = None
    ) -> Iterator[Iterator[str]]:
        with self._connected(), self._http.stream(method, path, json=json, timeout=timeout) as response:
            if not response.is_success:
                response.read()
            yield _events(_lines(_checked(response).iter_text()))

    def _is_past(self, deadline_s: float | None) -> bool:
        return deadline_s is not None and self._clock() >= deadline_s

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Turns what the network does to a call into Unavailable, with `reachable: false` in its details."""
        try:
            yield
        except httpx.TransportError as failure:
            raise Unavailable(
                _network_message(self.url, failure), details={"reachable": False, "url": str(self.url)}
            ) from failure


def _network_message(url: httpx.URL, failure: httpx.TransportError) -> str:
    if isinstance(failure, httpx.ConnectError | httpx.ConnectTimeout):
        return f"nothing answers at {url}; start it with `ostinato up`, or name another with --url"
    if isinstance(failure, httpx.TimeoutException):
        return f"no answer from {url} in time; look at `ostinato status`, then try again"
    return f"the connection to {url} broke off ({failure}); try again"


def _checked_url(text: str) -> httpx.URL:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as failure:
        raise errors.InvalidRequest(f"{text!r} is not a URL ({failure})", param="url") from failure
    if url.scheme not in {"http", "https"} or not url.host:
        raise errors.InvalidRequest(f"the URL should look like {DEFAULT_URL}; got {text!r}", param="url")
    return url


def _part(name: str) -> str:
    return quote(name, safe="")


def _body(request: BaseModel) -> dict[str, Any]:
    return request.model_dump(mode="json", exclude_none=True)


def _pause_s(error: Unavailable, attempt: int) -> float | None:
    """How long to wait before the next attempt; None: do not try again."""
    if error.details.get("reachable") is False:
        return 0.1 * 2.0 ** (attempt - 1)
    if error.retry_after_s is None or error.retry_after_s > LONGEST_PAUSE_S:
        return None
    return error.retry_after_s


def _parse(cls: type[M], response: httpx.Response) -> M:
    return _validated(cls, response.text)


def _validated(cls: type[M], text: str) -> M:
    try:
        return cls.model_validate_json(text)
    except ValidationError as failure:
        problem = failure.errors()[0]
        raise OstinatoError(
            f"the server's answer is not a {cls.__name__} ({problem['loc']}: {problem['msg']}); "
            "use a client and a server of the same version"
        ) from failure


# Server-sent events


def _lines(chunks: Iterable[str]) -> Iterator[str]:
    """Lines ended by newlines only: str.splitlines would also cut at characters that JSON leaves raw."""
    rest = ""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split("\n")
        for line in lines:
            yield line.removesuffix("\r")


def _events(lines: Iterable[str]) -> Iterator[str]:
    data: list[str] = []
    for line in lines:
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            yield "\n".join(data)
            data = []


def _delta(data: str) -> str:
    try:
        chunk = json.loads(data)
        if "error" in chunk:
            raise error_from_body(chunk)
        choices = chunk["choices"]
        return (choices[0]["delta"].get("content") or "") if choices else ""
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as failure:
        raise errors.EngineFailed(f"not a chat chunk: {data[:200]!r}") from failure


# Errors


_CLASSES = error_classes()


def error_from_body(body: Mapping[str, Any], retry_after_s: float | None = None) -> OstinatoError:
    """The exception an OpenAI error object stands for, bare or in its envelope."""
    error = body.get("error", body)
    if not isinstance(error, Mapping):
        error = {"message": str(error)}
    code = str(error.get("code") or OstinatoError.code)
    details = error.get("details")
    kept = dict(details) if isinstance(details, Mapping) else {}
    if code not in _CLASSES:
        kept["code"] = code
    return _CLASSES.get(code, OstinatoError)(
        str(error.get("message") or code),
        param=error.get("param"),
        details=kept,
        retry_after_s=retry_after_s,
    )


def error_of(operation: OperationView) -> OstinatoError:
    """Why an operation failed."""
    return error_from_body(operation.error or {"message": operation.reason})


def _checked(response: httpx.Response) -> httpx.Response:
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
        f"{where} answered {response.status_code} ({response.text[:200].strip()}); is this URL an Ostinato?",
        details={"status": response.status_code},
        retry_after_s=retry_after_s,
    )


def _retry_after_s(response: httpx.Response) -> float | None:
    try:
        return max(float(response.headers["Retry-After"]), 0.0)
    except (KeyError, ValueError):
        return None
