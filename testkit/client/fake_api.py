"""An HTTP server that speaks the REST contract with scripted answers, and records its requests."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

Answer = Callable[[], Response]


def operation(phase: str = "Deployed", progress: float = 1.0, **fields: Any) -> dict[str, Any]:
    final = phase in {"Ready", "Deployed", "Deleted", "Cancelled", "Failed"}
    view = {"id": "op-1", "kind": "deploy_model", "target": "smol", "phase": phase, "progress": progress}
    more = {"reason": f"now {phase}", "done": final, "error": None, "createdAt": 1.0, "updatedAt": 2.0}
    return {**view, **more, "events": [], **fields}


def model(name: str = "smol", **fields: Any) -> dict[str, Any]:
    view = {"model": name, "phase": "Ready", "source": "bundled://smol", "base": None, "adapter": None}
    more = {"compressionTechnique": {"none": 100.0}, "reason": "", "deployed": True, "variants": ["v1"]}
    return {**view, **more, "weightBytes": 3 << 20, "rank": None, "createdAt": 1.0, **fields}


def deployment(name: str = "smol", **fields: Any) -> dict[str, Any]:
    rank = {"rank": 0, "stage": 0, "node": "n1", "device": "cpu:0", "layers": [0, 30], "memoryBytes": 1 << 30}
    plan = {
        **{"tensorParallel": 1, "layersPerStage": [30], "quantization": "none", "maxModelLen": 2048},
        **{"kvCacheTokens": 9000, "maxVariants": 4, "maxLoraRank": 16, "ranks": [rank], "accuracy": 100.0},
        **{"estimatedTtftMs": 12.5, "estimatedTpotMs": 4.5, "reason": "the least memory [of 3 plans]"},
    }
    view = {"model": name, "phase": "Deployed", "host": name, "intent": "minCost", "maxOutputLength": 256}
    return {**view, "SLOs": {}, "reason": "", "plan": plan, "createdAt": 1.0, **fields}


def residency(*names: str, limit: int = 2) -> list[dict[str, Any]]:
    """One replica: the first variant has a slot on two ranks, the others wait in host memory."""

    def variant(i: int, name: str) -> dict[str, Any]:
        ranks = [{"rank": r, "hostBytes": 3 << 20, "deviceBytes": 0 if i else 2 << 20} for r in (0, 1)]
        place = {"tier": "host", "slot": None, "reason": "not in a slot [yet]"}
        return {
            "model": name,
            "ranks": ranks,
            **({"tier": "device", "slot": 0, "reason": ""} if not i else place),
        }

    counts = {"slots": 4, "limit": limit, "skips": 5, "preemptions": 6, "blockedRequests": 7}
    return [{"node": "n1", "pid": 99, **counts, "variants": [variant(i, n) for i, n in enumerate(names)]}]


STATUS = {
    "version": "0.1.0",
    "revision": 7,
    "devices": [{"node": "n1", "index": 0, "kind": "cpu", "totalBytes": 8 << 30, "freeBytes": 4 << 30}],
    "engines": [{"host": "smol", "status": "RUNNING", "message": "", "replicas": 1, "variants": ["v1"]}],
}


def error(code: str, message: str = "it went wrong; mend it", **fields: Any) -> dict[str, Any]:
    return {"error": {"message": message, "type": "api_error", "param": None, "code": code, **fields}}


def _node(name: str, **changes: Any) -> dict[str, Any]:
    device = {"index": 0, "kind": "h200", "model": "h200", "totalBytes": 8 << 30, "usedBytes": 2 << 30}
    device |= {"reservedBytes": 3 << 30, "headroomBytes": 0, "freeBytes": 4 << 30, "load": 0.25, "island": 0}
    held = {"deployment": "smol", "rank": 0, "device": "h200:0", "bytes": 3 << 30, "since": 1.0}
    uses = [{"deployment": "smol", "bytes": 1 << 30}, {"deployment": "", "bytes": 1 << 30}]
    node = {"name": name, "usable": True, "lost": False, "reason": "", "reportAgeS": 0.52, "agentPid": 7}
    node |= {"cores": 0.0, "devices": [{**device, "reservations": [held], "uses": uses}]}
    return {**node, "otherReservations": [], **changes}


LEFT = {"deployment": "old", "rank": 1, "device": "h200:3", "bytes": 1 << 30, "since": 1.0}
STALE = "stale report: the last report of node n2 was 7.2 s ago"
CLUSTER: dict[str, Any] = {
    "nodes": [
        _node("n1"),
        _node("n2", usable=False, reason=STALE, devices=[], otherReservations=[LEFT]),
    ]
}


def answer(content: Any, status: int = 200, **headers: str) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda: JSONResponse(content, status, headers=named)


def text(content: str, status: int = 200) -> Answer:
    return lambda: PlainTextResponse(content, status)


def events(*documents: Any, breaks: bool = False, hold: threading.Event | None = None) -> Answer:
    """A stream of server-sent events; one that `breaks` dies in the middle of a further event."""

    def generate() -> Iterator[str]:
        for document in documents:
            data = document if isinstance(document, str) else json.dumps(document, ensure_ascii=False)
            yield f"data: {data}\n\n"
        if hold is not None:
            hold.wait(10)
        if breaks:
            yield 'data: {"id": "op-'
            raise ConnectionResetError("scripted")

    return lambda: StreamingResponse(generate(), media_type="text/event-stream")


def chat_chunks(*pieces: str) -> Answer:
    chunks = [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces]
    return events({"choices": [{"index": 0, "delta": {"role": "assistant"}}]}, *chunks, "[DONE]")


class FakeApi:
    """A fake API that answers each route from its script, in order; the last answer is repeated for ever."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[tuple[str, Any, dict[str, str]]] = []
        self._script: dict[str, list[Answer]] = {}
        self.reset()

    def reset(self) -> None:
        self.asked.clear()
        self._script = {
            "GET /models": [answer({"models": [model("v1", base="smol", adapter="/a", rank=8), model()]})],
            "GET /models/smol": [answer(model())],
            "GET /deployments": [answer({"deployments": [deployment()]})],
            "GET /deployments/smol": [answer(deployment(residency=residency("v1", "v2")))],
            "PATCH /deployments/smol": [
                answer(deployment(maxActiveVariants=2, residency=residency("v1", "v2")))
            ],
            "POST /deployments/v1/prefetch": [
                answer(deployment("v1", host="smol", residency=residency("v1")))
            ],
            "GET /deployments/smol/logs": [text("one\ntwo\n")],
            "GET /status": [answer(STATUS)],
            "GET /cluster": [answer(CLUSTER)],
            "GET /operations": [answer({"operations": [operation()]})],
            "GET /operations/op-1": [answer(operation("Deploying", 0.5))],
            "GET /operations/op-1/watch": [events(operation("Deploying", 0.5), operation())],
            "POST /operations/op-1/cancel": [answer(operation("Deploying", 0.5))],
            "POST /register_model": [answer(operation("Pending", 0.0, kind="register_model"), 202)],
            "POST /deploy_model": [answer(operation("Pending", 0.0), 202)],
            "DELETE /deployments/smol": [answer(operation("Pending", 0.0, kind="undeploy_model"), 202)],
            "DELETE /models/smol": [answer(operation("Deleted", kind="delete_model"))],
            "POST /rebalance": [
                answer(
                    {
                        "goal": "free a device",
                        "possible": False,
                        "gain": "no moves of engines can do this",
                        "moves": [],
                    }
                )
            ],
            "POST /inference_model": [
                answer(
                    {
                        **{"model": "smol", "outputText": "four", "finishReason": "stop"},
                        **{"inputTokens": 5, "outputTokens": 1, "format": "chat", "note": ""},
                    }
                )
            ],
            "POST /v1/chat/completions": [chat_chunks("Hel", "lo")],
        }

    def script(self, route: str, *answers: Answer) -> None:
        self._script[route] = list(answers)

    def calls(self, route: str) -> list[tuple[Any, dict[str, str]]]:
        """The bodies and headers that a route was asked with."""
        return [(body, headers) for asked, body, headers in self.asked if asked == route]

    async def handle(self, request: Request) -> Response:
        route = f"{request.method} {request.url.path}"
        body = await request.body()
        self.asked.append((route, json.loads(body) if body else None, dict(request.headers)))
        script = self._script.get(route)
        if not script:
            return JSONResponse(error("model_not_found", f"nothing at {route}; look elsewhere"), 404)
        return (script.pop(0) if len(script) > 1 else script[0])()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


def serve(api: FakeApi) -> Iterator[FakeApi]:
    """The API on a free port, for as long as the caller holds the iterator."""
    app = FastAPI(openapi_url=None)
    app.add_route("/{path:path}", api.handle, methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
    listening = socket.create_server(("127.0.0.1", 0))
    api.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    server = _Server(uvicorn.Config(app, log_config=None, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    assert server.ready.wait(60)
    yield api
    server.should_exit = True
    thread.join(60)
