"""vLLM's asynchronous scheduler, with variants: only requests with a variant in a slot run, and none starves.

Before each of vLLM's own steps, requests that may not run yet are taken out of its queues, and put back
afterwards. vLLM schedules the others as usual (tokens, KV blocks, chunks).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from workers.bus.sockets import Message, SchedulerSocket
from workers.scheduling.admission_records import AdmissionRecords, variant_of
from workers.scheduling.policy import BASE, Rules
from workers.scheduling.residency import Residency
from workers.variant_config import ADDRESS_VARIABLE, from_additional

log = logging.getLogger(__name__)

# The pause after a step without work, when all requests wait for their variants; a rank's report ends it
# early. Without it the loop would retry at once, and the threads that read reports would hardly run. vLLM's
# own loop pauses, too, but not the loop of an engine in its own process, as in measurements.
IDLE_S = 0.001
# How long a step waits for a variant that only has to be copied from host memory. Ranks report as soon as the
# copy has begun. Otherwise the variant would run one whole step later. Meanwhile the device computes the step
# before.
PLACING_S = 0.003
QUEUES = ("waiting", "skipped_waiting", "kv_holding_waiting")
Held = tuple[Any, list[Any]]  # a queue of vLLM, and the requests taken out of it


def make_scheduler(*, vllm_config: Any, **others: Any) -> Any:
    """The factory named by vLLM's `--scheduler-cls`: vLLM decides whether this engine schedules
    asynchronously.
    """
    asynchronous = vllm_config.scheduler_config.async_scheduling
    chosen = AsyncVariantScheduler if asynchronous else SyncVariantScheduler
    return chosen(vllm_config=vllm_config, **others)


class _Variants:
    """A mixin over a scheduler of vLLM. Needs ADDRESS_VARIABLE in the environment, which the ranks read,
    too.
    """

    # vLLM's own attributes, which are untyped here
    running: list[Any]
    waiting: Any
    requests: dict[str, Any]
    finished_req_ids: set[str]
    prev_step_scheduled_req_ids: set[str]
    parallel_config: Any
    vllm_config: Any
    lora_config: Any
    _pause_state: Any
    finish_requests: Callable[..., list[Any]]
    _preempt_request: Callable[[Any, float], None]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = from_additional(
            self.vllm_config.additional_config, self.lora_config.max_loras, self.lora_config.max_lora_rank
        )
        self._longest_wait_s = float(config.longest_wait_s)
        self._limit = config.slots
        # variants of each step whose output has not arrived yet
        self._in_flight: deque[frozenset[int]] = deque()
        self._uses: Counter[int] = Counter()
        self._records = AdmissionRecords()
        self._records.decide(0.0, self._rules())  # compiled, or read from the cache, before the first request
        self.skips = self.preemptions = 0
        self._lock = threading.Lock()
        self._reported = threading.Condition(self._lock)
        self._residency = Residency(config.slots, self.parallel_config.world_size)
        self._ranks: dict[int, bytes] = {}
        self._askers: list[tuple[bytes, str, int]] = []
        self._ended: list[tuple[Any, str]] = []  # requests, and the errors with which they ended
        self._socket = SchedulerSocket(os.environ[ADDRESS_VARIABLE], self._received)

    # --- vLLM's two calls per step ---------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self._residency.failing or self._residency.lost:  # rarely true, so it is read without the lock
            self._give_up_failed()
        held = self._admit()
        try:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            _put_back(held)
        self._note_scheduled(output)
        return output

    def add_request(self, request: Any) -> None:
        if self._residency.failing:
            self._try_again(variant_of(request))
        super().add_request(request)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if self._residency.failing:
            self._give_up_failed()
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        _tell(self._ended, outputs)
        self._ended.clear()
        self._uses.subtract(self._in_flight.popleft())
        self._uses = +self._uses  # only counts above zero
        if self._residency.departing:
            self._let_go()
        return outputs

    def shutdown(self) -> None:
        self._socket.close()
        super().shutdown()  # type: ignore[misc]

    # --- admission -------------------------------------------------------------------------------

    def _admit(self) -> list[Held]:
        """Preempt and hold back requests by the policy; returns those held back, by queue."""
        self._records.clear()
        waiting = [r for queue in self._queues() for r in queue]
        paused = self._pause_state != PauseState.UNPAUSED  # then vLLM admits no request
        if paused or not any(r.lora_request for r in waiting):
            return []
        with self._lock:
            self._decide(waiting)
            loads = self._records.loads()
            self._load(loads, waiting)
            self._flush()
            if self._await(loads):
                self._decide(waiting)
            if next_one := self._records.first_blocked():
                self._residency.read_ahead(variant_of(next_one), next_one.lora_request.lora_path)
            self._flush()
        self._preempt(self._records.preempted())
        admitted = self._records.admitted()
        return [_hold_back(queue, admitted) for queue in self._queues()]

    def _decide(self, waiting: list[Any]) -> None:
        self._records.see(self.running, waiting, self._residency.readiness, self._residency.size_bytes)
        self._records.decide(time.time(), self._rules())

    def _await(self, uids: Iterable[int]) -> bool:
        """Wait for variants that the ranks will report very soon, if any. Releases the lock meanwhile."""
        soon = [uid for uid in uids if self._residency.soon(uid)]
        if soon:
            self._reported.wait_for(lambda: not any(map(self._residency.soon, soon)), PLACING_S)
        return bool(soon)

    def _rules(self) -> Rules:
        return Rules(self._limit, self._longest_wait_s)

    def _queues(self) -> list[Any]:
        """vLLM's queues of waiting requests; which queues there are after the first depends on its
        version.
        """
        return [getattr(self, name) for name in QUEUES if hasattr(self, name)]

    def _waiting(self) -> list[Any]:
        return sorted((r for queue in self._queues() for r in queue), key=_arrival)

    def _preempt(self, requests: Iterable[Any]) -> None:
        """Preempt requests as vLLM does when KV blocks run out: their blocks are freed, and they wait
        again.
        """
        now = time.monotonic()
        for request in requests:
            self.running.remove(request)
            self._preempt_request(request, now)
            self.prev_step_scheduled_req_ids.discard(request.request_id)
            self.preemptions += 1

    def _note_scheduled(self, output: Any) -> None:
        """Record the requests that skipped the line, and the variants that the step uses until its output
        arrives.
        """
        for request_id in output.finished_req_ids:
            self._records.forget(request_id)
        self.skips += self._records.began(output.num_scheduled_tokens)
        step = frozenset(variant_of(self.requests[i]) for i in output.num_scheduled_tokens) - {BASE}
        if not output.num_scheduled_tokens and not self._in_flight:
            with self._reported:
                self._reported.wait(IDLE_S)
        self._in_flight.append(step)
        self._uses.update(step)
        with self._lock:
            self._residency.touch(step)

    # --- variants --------------------------------------------------------------------------------

    def _let_go(self) -> None:
        """Forget departing variants once no request names them and no step in flight reads them."""
        wanted = {variant_of(request) for request in self.requests.values()} | self._uses.keys()
        with self._lock:
            self._residency.let_go(frozenset(wanted))
            self._flush()

    def _load(self, uids: Iterable[int], waiting: list[Any]) -> None:
        if not uids:
            return
        paths = {variant_of(r): r.lora_request.lora_path for r in waiting if r.lora_request}
        busy = frozenset(self._uses) | self._records.active()
        for uid in uids:
            if not self._residency.error(uid):  # its requests end in `_give_up_failed`
                self._residency.load(uid, paths[uid], busy)

    def _flush(self) -> None:
        """Send the residency's messages to the ranks, once all ranks have connected."""
        if len(self._ranks) < self.parallel_config.world_size:
            return
        for message in self._residency.outbox:
            for rank in self._ranks.values():
                self._socket.send(rank, message)
        self._residency.outbox.clear()

    def _received(self, sender: bytes, message: Message) -> None:
        """Handle a message in the socket's thread: a rank's report (`did`), or a worker's question
        (`ask`).
        """
        with self._lock:
            match message.get("did") or message.get("ask"):
                case "hello":
                    self._ranks[message["rank"]] = sender
                    self._residency.has_room(message["rank"], message["capacity"])
                case "prepare":
                    self._residency.prepare(message["uid"], message["path"])
                    self._askers.append((sender, message["id"], message["uid"]))
                case "state":
                    self._socket.send(sender, {"id": message["id"], **self._state()})
                case "forget":
                    self._residency.forget(message["uid"])
                    self._let_go_if_idle()
                    self._socket.send(sender, {"id": message["id"]})
                case "limit":
                    self._limit = min(max(1, message["limit"]), self._residency.slots)
                    self._socket.send(sender, {"id": message["id"], "limit": self._limit})
                case _:
                    self._residency.reported(message["rank"], message)
                    self._answer_askers()
                    self._let_go_if_idle()
                    self._reported.notify_all()
            self._flush()

    def _let_go_if_idle(self) -> None:
        """Let departing variants go now if no step would come to do it."""
        if self._residency.departing and not self.requests and not self._uses:
            self._residency.let_go(frozenset())

    def _answer_askers(self) -> None:
        """Answer the workers that wait for a variant: it is loaded, or why it cannot be loaded."""
        waiting = []
        for sender, question_id, uid in self._askers:
            error = self._residency.error(uid)
            if error or self._residency.prepared(uid):
                answer = {"id": question_id, "error": error, "fault": self._residency.fault(uid)}
                self._socket.send(sender, answer)
            else:
                waiting.append((sender, question_id, uid))
        self._askers = waiting

    def _state(self) -> Message:
        return {
            "slots": self._residency.slots,
            "limit": self._limit,
            "skips": self.skips,
            "preemptions": self.preemptions,
            # From the last step, which may be long ago: without requests that ended since.
            "blocked": sum(request_id in self.requests for request_id in self._records.blocked()),
            "variants": self._residency.snapshot(),
        }

    def _try_again(self, uid: int) -> None:
        """Forget an old error that no request received: it must not end the next request."""
        if not any(variant_of(request) == uid for request in self.requests.values()):
            with self._lock:
                self._residency.forgive(uid)

    def _give_up_failed(self) -> None:
        """End the requests of variants that could not be loaded, with an error.

        Running requests end, too: the output of a variant that did not reach its slot must not reach a
        client. Its slot is kept while steps use it.
        """
        with self._lock:
            failures = self._residency.take_failures()
        ending = [r.request_id for r in self.requests.values() if variant_of(r) in failures]
        ended = self.finish_requests(ending, RequestStatus.FINISHED_ERROR)
        self._ended += [(request, failures[variant_of(request)]) for request in ended]
        with self._lock:
            self._residency.give_up(self._uses.keys())
            self._flush()


def _tell(ended: Iterable[tuple[Any, str]], outputs: dict[int, Any]) -> None:
    """Add the outputs of the requests that ended with an error."""
    for request, error in ended:
        log.error("request %s ends: %s", request.request_id, error)
        output = EngineCoreOutput(
            request_id=request.request_id, new_token_ids=[], finish_reason=request.get_finished_reason()
        )
        outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[])).outputs.append(output)


class AsyncVariantScheduler(_Variants, AsyncScheduler):  # type: ignore[misc]  # vLLM is untyped here
    """Prepares one step while another runs."""


class SyncVariantScheduler(_Variants, Scheduler):  # type: ignore[misc]
    """For engines that vLLM cannot schedule ahead: pipelines on CPU."""


def _hold_back(queue: Any, admitted: set[str]) -> Held:
    """Take the requests that may not run now out of a queue."""
    held = [r for r in queue if r.request_id not in admitted or _has_output_due(r)]
    if held:
        queue.remove_requests(held)
    return queue, held


def _put_back(held: list[Held]) -> None:
    """Put all waiting requests back, in order of arrival; a queue by priority keeps its own order."""
    for queue, requests in held:
        if requests and isinstance(queue, deque):
            everyone = sorted((*queue, *requests), key=_arrival)
            queue.clear()
            queue.extend(everyone)
        else:
            for request in requests:
                queue.add_request(request)


def _has_output_due(request: Any) -> bool:
    """Whether a preempted request's last step is still under way: until it ends, the request must not start
    again.
    """
    return bool(request.status == RequestStatus.PREEMPTED and request.num_in_flight_tokens > 0)


_arrival = attrgetter("arrival_time", "request_id")
