"""The REST API as typed calls. Errors are raised as the classes of errors.py, found by their `code`."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import httpx
from pydantic import BaseModel

from controlplane import errors
from controlplane.api_keys import UNSENDABLE, is_sendable
from controlplane.client.responses import (
    DEFAULT_URL,
    answer_of,
    body_of,
    checked,
    checked_url,
    chunk_of,
    error_of,
    events_of,
    lines_of,
    network_message,
    parse,
    path_part,
    pause_of,
    text_of,
    validated,
)
from controlplane.errors import Unavailable
from controlplane.management.schemas.models import (
    DeploymentView,
    InferenceModelRequest,
    InferenceModelResponse,
    ModelView,
    OperationView,
    RegisterModelRequest,
    TuneRequest,
)
from controlplane.management.schemas.placement import PreviewView
from controlplane.management.schemas.status import Deployments, Models, Operations, StatusView
from controlplane.state.terms import Phase

if TYPE_CHECKING:  # imports that only some commands need are local, so that the others start faster
    from controlplane.management.schemas.cluster import ClusterView
    from controlplane.management.schemas.deploy import (
        DeployModelRequest,
        EngineForm,
        ReplicasChange,
        Targets,
    )
    from controlplane.management.schemas.estimates import (
        EstimateRequest,
        EstimateView,
        PlansRequest,
        ProfileView,
    )
    from controlplane.management.schemas.evaluations import EvaluationForm, EvaluationView
    from controlplane.management.schemas.rebalance import RebalanceRequest, RebalanceView

ATTEMPTS = 4  # total tries of one call
RECONNECTS = 30  # of one watch, since the operation last changed
STREAM_SILENCE_S = 60.0  # a watch that is silent for longer is opened again


class Client:
    """A client of one Ostinato. Safe calls and calls with an Idempotency-Key are retried; others are not."""

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        timeout_s: float = 600.0,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = checked_url(url or os.environ.get("OSTINATO_URL") or DEFAULT_URL)
        key = os.environ.get("OSTINATO_API_KEY", "") if api_key is None else api_key
        if key and not is_sendable(key):
            raise errors.InvalidRequest(UNSENDABLE, param="OSTINATO_API_KEY")
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(30.0, connect=5.0),
            verify=self.url.scheme == "https",  # loading unused certificates takes 50 ms
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
        return parse(OperationView, self._create("POST", "/register_model", request))

    def models(self) -> list[ModelView]:
        return parse(Models, self._get("/models")).models

    def model(self, name: str) -> ModelView:
        return parse(ModelView, self._get(f"/models/{path_part(name)}"))

    def delete_model(self, name: str) -> OperationView:
        return parse(OperationView, self._create("DELETE", f"/models/{path_part(name)}"))

    # Profiles and estimates

    def profile_model(self, name: str, again: bool = False) -> OperationView:
        """Measure the missing parts of the profile of a model's architecture; `again`: everything."""
        from controlplane.management.schemas.estimates import ProfileRequest

        path = f"/models/{path_part(name)}/profile"
        return parse(OperationView, self._create("POST", path, ProfileRequest(again=again)))

    def profile(self, name: str) -> ProfileView:
        from controlplane.management.schemas.estimates import ProfileView

        return parse(ProfileView, self._get(f"/models/{path_part(name)}/profile"))

    def estimate(self, name: str, request: EstimateRequest) -> EstimateView:
        """The cost of a plan under a load. Errors: also InvalidRequest, naming the wrong field."""
        from controlplane.management.schemas.estimates import EstimateView

        return parse(EstimateView, self._create("POST", f"/models/{path_part(name)}/estimate", request))

    def plans(self, name: str, request: PlansRequest) -> list[EstimateView]:
        """The cost of every plan under a load, fewest ranks first."""
        from controlplane.management.schemas.estimates import PlansView

        return parse(PlansView, self._create("POST", f"/models/{path_part(name)}/plans", request)).plans

    # Evaluations

    def evaluations(self, name: str) -> list[EvaluationView]:
        from controlplane.management.schemas.evaluations import EvaluationsView

        return parse(EvaluationsView, self._get(f"/models/{path_part(name)}/evaluations")).evaluations

    def keep_evaluations(self, name: str, found: Sequence[EvaluationForm]) -> list[EvaluationView]:
        """Store evaluations with the model; each replaces an older one of the same task, metric and
        reference. Returns all stored evaluations."""
        from controlplane.management.schemas.evaluations import EvaluationsRequest, EvaluationsView

        path, body = (
            f"/models/{path_part(name)}/evaluations",
            body_of(EvaluationsRequest(evaluations=[*found])),
        )
        return parse(EvaluationsView, self._retry(lambda: self._http.put(path, json=body))).evaluations

    # Deployments

    def deploy_model(self, request: DeployModelRequest) -> OperationView:
        return parse(OperationView, self._create("POST", "/deploy_model", request))

    def plan_deployment(self, request: DeployModelRequest) -> PreviewView:
        """Preview a deployment on the present cluster. Errors: also NoFeasiblePlan, where it would fail."""
        return parse(PreviewView, self._retry(lambda: self._http.post("/plan", json=body_of(request))))

    def rebalance(self, request: RebalanceRequest) -> RebalanceView:
        """Propose moves, and begin them unless it is a dry run. Errors: NotReady while other moves are
        under way, so a repeated call begins them once."""
        from controlplane.management.schemas.rebalance import RebalanceView

        return parse(RebalanceView, self._retry(lambda: self._http.post("/rebalance", json=body_of(request))))

    def deployments(self) -> list[DeploymentView]:
        return parse(Deployments, self._get("/deployments")).deployments

    def deployment(self, name: str) -> DeploymentView:
        return parse(DeploymentView, self._get(f"/deployments/{path_part(name)}"))

    def undeploy(self, name: str) -> OperationView:
        return parse(OperationView, self._create("DELETE", f"/deployments/{path_part(name)}"))

    def tune(
        self,
        name: str,
        max_active_variants: int | None = None,
        replicas: ReplicasChange | None = None,
        place_anew: bool = False,
        targets: Targets | None = None,
        engine: EngineForm | None = None,
    ) -> DeploymentView:
        """Change a deployment: the most variants of a base that run at once, its replicas, its or a
        variant's targets. With `place_anew`, place the base's engines again, with memory for the variants
        that are registered now and with the sizes named in `engine` (None: chosen again)."""
        anew = place_anew or None  # absent changes are not sent
        body = TuneRequest(
            maxActiveVariants=max_active_variants,
            replicas=replicas,
            placeAnew=anew,
            targets=targets,
            engine=engine,
        )
        sent = body_of(body)
        for field, form in (("targets", targets), ("engine", engine)):
            if form is not None:  # a field that is set to None is cleared
                sent[field] = form.model_dump(mode="json", exclude_unset=True)
        return parse(DeploymentView, self._create("PATCH", f"/deployments/{path_part(name)}", sent))

    def prefetch(self, name: str) -> DeploymentView:
        """Prefetch a variant into host memory; returns when it is there."""
        path = f"/deployments/{path_part(name)}/prefetch"
        send = lambda: self._http.post(path, timeout=self._answer_timeout)  # noqa: E731
        return parse(DeploymentView, self._retry(send))

    def logs(self, name: str, lines: int = 200) -> str:
        return self._get(f"/deployments/{path_part(name)}/logs", lines=lines).text

    def status(self) -> StatusView:
        return parse(StatusView, self._get("/status"))

    def cluster(self) -> ClusterView:
        from controlplane.management.schemas.cluster import ClusterView

        return parse(ClusterView, self._get("/cluster"))

    # Operations

    def operations(self) -> list[OperationView]:
        return parse(Operations, self._get("/operations")).operations

    def operation(self, operation_id: str) -> OperationView:
        return parse(OperationView, self._get(f"/operations/{path_part(operation_id)}"))

    def cancel(self, operation_id: str) -> OperationView:
        return parse(OperationView, self._create("POST", f"/operations/{path_part(operation_id)}/cancel"))

    def watch(self, operation_id: str) -> Iterator[OperationView]:
        """Yield the operation now and after each change, until it is done. A broken stream is opened
        again."""
        return self._watch(operation_id, deadline_s=None)

    def wait(self, operation: OperationView | str, timeout_s: float | None = None) -> OperationView:
        """Wait for an operation, and return it. A failed operation raises its error. Errors: TimeoutError."""
        operation_id = operation if isinstance(operation, str) else operation.id
        deadline_s = None if timeout_s is None else self._clock() + timeout_s
        for view in self._watch(operation_id, deadline_s):
            if view.phase == Phase.FAILED:
                raise error_of(view)
            if view.done:
                return view
            if self._is_past(deadline_s):
                break
        raise TimeoutError(
            f"operation {operation_id} is not done after {timeout_s} s; it continues: wait for it again"
        )

    # Inference

    def inference_model(self, request: InferenceModelRequest) -> InferenceModelResponse:
        """One answer. A model without a chat template completes the text; `note` then says so.

        Errors: also NoChatTemplate, if `format` is chat.
        """
        with self._connected():
            response = self._http.post(
                "/inference_model", json=body_of(request), timeout=self._answer_timeout
            )
        return parse(InferenceModelResponse, checked(response))

    def chat_stream(
        self, model: str, messages: Sequence[Mapping[str, str]], **params: Any
    ) -> Generator[str, None, None]:
        """The answer's text as it is generated. Errors: also EngineFailed when the stream breaks."""
        body = {**params, "model": model, "messages": list(messages)}
        with closing(self.chunks("/v1/chat/completions", body)) as chunks:
            for chunk in chunks:
                yield text_of(chunk)

    def complete(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A whole OpenAI answer. Retried while the server does not answer, so the request must be safe to
        repeat. Errors: also EngineFailed for an answer without choices."""
        send = lambda: self._http.post(path, json=dict(body), timeout=self._answer_timeout)  # noqa: E731
        return answer_of(self._retry(send).text)

    def chunks(
        self, path: str, body: Mapping[str, Any], silence_s: float | None = None
    ) -> Generator[dict[str, Any], None, None]:
        """The chunks of a streamed OpenAI answer, as they come. Closing it cancels the request.

        Errors: also EngineFailed when the stream breaks, Unavailable after `silence_s` without a chunk.
        """
        timeout = self._answer_timeout if silence_s is None else httpx.Timeout(silence_s, connect=5.0)
        with self._stream("POST", path, timeout, json={**body, "stream": True}) as events:
            for data in events:
                if data == "[DONE]":
                    return
                yield chunk_of(data)
        raise errors.EngineFailed(
            "the connection broke off before the end of the answer; send the request again"
        )

    # One call

    def _get(self, path: str, **params: int) -> httpx.Response:
        return self._retry(lambda: self._http.get(path, params=params))

    def _create(
        self, method: str, path: str, request: BaseModel | dict[str, Any] | None = None
    ) -> httpx.Response:
        """Send a call that changes something. Its key lets the server recognise a repetition."""
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        body = body_of(request) if isinstance(request, BaseModel) else request
        return self._retry(lambda: self._http.request(method, path, json=body, headers=headers))

    def _retry(self, send: Callable[[], httpx.Response]) -> httpx.Response:
        for attempt in range(1, ATTEMPTS):
            try:
                return self._send(send)
            except Unavailable as error:
                pause_s = pause_of(error, attempt)
                if pause_s is None:
                    raise
            self._sleep(pause_s)
        return self._send(send)

    def _send(self, send: Callable[[], httpx.Response]) -> httpx.Response:
        with self._connected():
            response = send()
        return checked(response)

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
                raise Unavailable(
                    f"the connection that reports operation {operation_id} keeps breaking off; watch the "
                    "operation again"
                )
            self._sleep(min(0.1 * 2**breaks, 2.0))

    def _watch_once(self, operation_id: str, deadline_s: float | None) -> Iterator[OperationView]:
        left_s = STREAM_SILENCE_S if deadline_s is None else max(deadline_s - self._clock(), 0.001)
        timeout = httpx.Timeout(min(left_s, STREAM_SILENCE_S), connect=5.0)
        with self._stream("GET", f"/operations/{path_part(operation_id)}/watch", timeout) as events:
            for data in events:
                yield validated(OperationView, data)

    @contextmanager
    def _stream(
        self, method: str, path: str, timeout: httpx.Timeout, json: object = None
    ) -> Iterator[Iterator[str]]:
        with self._connected(), self._http.stream(method, path, json=json, timeout=timeout) as response:
            if not response.is_success:
                response.read()
            yield events_of(lines_of(checked(response).iter_text()))

    def _is_past(self, deadline_s: float | None) -> bool:
        return deadline_s is not None and self._clock() >= deadline_s

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Turn a network failure of a call into Unavailable, with `reachable: false` in its details."""
        try:
            yield
        except httpx.TransportError as failure:
            raise Unavailable(
                network_message(self.url, failure),
                details={"reachable": False, "url": str(self.url.copy_with(username=None, password=None))},
            ) from failure
