"""vLLM's asynchronous scheduler, with variants: only what lies in a slot runs, and nobody starves.

Before each of vLLM's own steps, requests that may not run yet are taken out of its queues and put
back afterwards; vLLM decides about the others as it always does (tokens, KV blocks, chunks).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from workers.scheduling.bus import Hub, Message
from workers.scheduling.policy import BASE, Decision, Readiness, Running, Snapshot, Waiting, decide
from workers.scheduling.residency import Residency
from workers.variants.config import ADDRESS_VARIABLE, from_additional

log = logging.getLogger(__name__)


def make_scheduler(*, vllm_config: Any, **others: Any) -> Any:
    """What vLLM's `--scheduler-cls` names: vLLM knows best whether this engine schedules asynchronously."""
    asynchronous = vllm_config.scheduler_config.async_scheduling
    chosen = AsyncVariantScheduler if asynchronous else SyncVariantScheduler
    return chosen(vllm_config=vllm_config, **others)


class _Variants:
    """Over a scheduler of vLLM. Needs ADDRESS_VARIABLE in the environment, of which the ranks know, too."""

    # vLLM's own, which is untyped here
    running: list[Any]
    waiting: Any
    requests: dict[str, Any]
    finished_req_ids: set[str]
    prev_step_scheduled_req_ids: set[str]
    parallel_config: Any
    vllm_config: Any
    lora_config: Any
    finish_requests: Callable[..., list[Any]]
    _preempt_request: Callable[[Any, float], None]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = from_additional(
            self.vllm_config.additional_config, self.lora_config.max_loras, self.lora_config.max_lora_rank
        )
        self._longest_wait_s = config.longest_wait_s
        self._limit = config.slots
        self._parents: dict[str, str] = {}
        self._in_flight: deque[frozenset[int]] = deque()  # variants of each step whose output is due
        self._uses: Counter[int] = Counter()
        self._decision = Decision()
        self._blocked_since: dict[str, float] = {}
        self.skips = self.preemptions = 0
        self._lock = threading.Lock()
        self._residency = Residency(config.slots, self.parallel_config.world_size)
        self._ranks: dict[int, bytes] = {}
        self._askers: list[tuple[bytes, str, int]] = []
        self._hub = Hub(os.environ[ADDRESS_VARIABLE], self._received)

    # --- vLLM's two calls per step ---------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        held = self._admit()
        try:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._put_back(held)
        self._note_scheduled(output)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        self._uses.subtract(self._in_flight.popleft())
        self._uses = +self._uses  # only what is above zero
        return self._failed(outputs)

    def shutdown(self) -> None:
        self._hub.close()
        super().shutdown()  # type: ignore[misc]

    # --- admission -------------------------------------------------------------------------------

    def _admit(self) -> list[Any]:
        """Preempt, hold back and order as the policy says; returns the requests held back."""
        waiting = self._waiting()
        if not any(_variant(r) for r in waiting):
            self._decision = Decision()
            return []
        with self._lock:
            self._decision = decide(self._snapshot(waiting))
            self._load(self._decision.load, waiting)
            self._flush()
        self._preempt(self._decision.preempt)
        admitted = set(self._decision.admit)
        held = [r for r in self._waiting() if r.request_id not in admitted or _has_output_due(r)]
        for queue in self._queues():
            queue.remove_requests(held)
        return held

    def _queues(self) -> list[Any]:
        """vLLM's queues of requests that wait for a variant or for room; before 0.30 there were two."""
        return [self.waiting, *([self.skipped_waiting] if hasattr(self, "skipped_waiting") else [])]

    def _waiting(self) -> list[Any]:
        return sorted((r for queue in self._queues() for r in queue), key=_arrival)

    def _snapshot(self, waiting: list[Any]) -> Snapshot:
        variants = {_variant(r) for r in (*waiting, *self.running)}
        readiness = {uid: self._residency.readiness(uid) for uid in variants}
        readiness[BASE] = Readiness.READY
        return Snapshot(
            now_s=time.time(),
            running=[self._running(r) for r in self.running],
            waiting=[Waiting(r.request_id, _variant(r), r.arrival_time) for r in waiting],
            readiness=readiness,
            limit=self._limit,
            longest_wait_s=self._longest_wait_s,
        )

    def _running(self, request: Any) -> Running:
        left = request.max_tokens - request.num_output_tokens
        parent = self._parents.get(request.request_id)
        return Running(request.request_id, _variant(request), request.arrival_time, left, parent)

    def _preempt(self, ids: list[str]) -> None:
        """As vLLM does it when KV blocks run out: their blocks are freed, and they wait again."""
        chosen = set(ids)
        now = time.monotonic()
        for request in [r for r in self.running if r.request_id in chosen]:
            self.running.remove(request)
            self._preempt_request(request, now)
            self._parents.pop(request.request_id, None)
            self.prev_step_scheduled_req_ids.discard(request.request_id)
            self.preemptions += 1

    def _put_back(self, held: list[Any]) -> None:
        """All waiting requests again, in the order they came."""
        everyone = sorted((*self.waiting, *held), key=_arrival)
        self.waiting.remove_requests(list(self.waiting))
        for request in everyone:
            self.waiting.add_request(request)

    def _note_scheduled(self, output: Any) -> None:
        """Remember who skipped the line, and which variants the step uses until its output is there."""
        for request_id, parent in self._decision.parents.items():
            if request_id in output.num_scheduled_tokens and request_id not in self._parents:
                self._parents[request_id] = parent
                self.skips += 1
        for request_id in self.finished_req_ids:
            self._parents.pop(request_id, None)
        step = frozenset(_variant(self.requests[i]) for i in output.num_scheduled_tokens) - {BASE}
        self._in_flight.append(step)
        self._uses.update(step)
        with self._lock:
            self._residency.touch(step)

    # --- variants --------------------------------------------------------------------------------

    def _load(self, uids: Iterable[int], waiting: list[Any]) -> None:
        if not uids:
            return
        paths = {_variant(r): r.lora_request.lora_path for r in waiting if r.lora_request}
        busy = frozenset(self._uses) | self._decision.seats
        for uid in uids:
            if not self._residency.error(uid):  # its requests end in `_failed`
                self._residency.load(uid, paths[uid], busy)

    def _flush(self) -> None:
        """Send what the residency has for the ranks, once all of them are there."""
        if len(self._ranks) < self.parallel_config.world_size:
            return
        for message in self._residency.outbox:
            for rank in self._ranks.values():
                self._hub.send(rank, message)
        self._residency.outbox.clear()

    def _received(self, sender: bytes, message: Message) -> None:
        """In the hub's thread: a report of a rank (`did`), or a question of the worker (`ask`)."""
        with self._lock:
            match message.get("did") or message.get("ask"):
                case "hello":
                    self._ranks[message["rank"]] = sender
                case "prepare":
                    self._residency.prepare(message["uid"], message["path"])
                    self._askers.append((sender, message["id"], message["uid"]))
                case "state":
                    self._hub.send(sender, {"id": message["id"], **self._state()})
                case "limit":
                    self._limit = min(max(1, message["limit"]), self._residency.slots)
                    self._hub.send(sender, {"id": message["id"], "limit": self._limit})
                case _:
                    self._residency.reported(message["rank"], message)
                    self._answer_askers()
            self._flush()

    def _answer_askers(self) -> None:
        """Tell those who asked for a variant that it is there, or why it never will be."""
        waiting = []
        for sender, asked, uid in self._askers:
            error = self._residency.error(uid)
            if error or self._residency.prepared(uid):
                self._hub.send(sender, {"id": asked, "error": error})
            else:
                waiting.append((sender, asked, uid))
        self._askers = waiting

    def _state(self) -> Message:
        return {
            "slots": self._residency.slots,
            "limit": self._limit,
            "skips": self.skips,
            "preemptions": self.preemptions,
            "blocked": len(self._decision.blocked),
            "variants": self._residency.snapshot(),
        }

    def _failed(self, outputs: dict[int, Any]) -> dict[int, Any]:
        """Requests of variants that could not be loaded end with an error."""
        with self._lock:
            found = {r.request_id: self._residency.error(_variant(r)) for r in self._waiting() if _variant(r)}
            errors = {request_id: error for request_id, error in found.items() if error}
            for request_id in errors:
                self._residency.forgive(_variant(self.requests[request_id]))
        for request in self.finish_requests(errors, RequestStatus.FINISHED_ERROR) if errors else ():
            log.error("request %s ends: %s", request.request_id, errors[request.request_id])
            output = EngineCoreOutput(
                request_id=request.request_id, new_token_ids=[], finish_reason=request.get_finished_reason()
            )
            outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[])).outputs.append(output)
        return outputs


class AsyncVariantScheduler(_Variants, AsyncScheduler):  # type: ignore[misc]  # vLLM is untyped here
    """One step is prepared while another runs."""


class SyncVariantScheduler(_Variants, Scheduler):  # type: ignore[misc]
    """For what vLLM cannot schedule ahead: pipelines on CPU."""


def _variant(request: Any) -> int:
    return request.lora_request.lora_int_id if request.lora_request else BASE


def _has_output_due(request: Any) -> bool:
    """A preempted request whose last step is still under way must not begin again before it has ended."""
    return bool(request.status == RequestStatus.PREEMPTED and request.num_in_flight_tokens > 0)


def _arrival(request: Any) -> tuple[float, str]:
    return request.arrival_time, request.request_id
