"""Decides which job runs next, so that no tenant holds every place. Pure.

Jobs are grammars to compile (`checked_grammars`) and chats to render (`template_turns`).
"""

from __future__ import annotations

from collections import Counter

AT_ONCE = 3  # jobs that run at the same time
OF_A_TENANT = AT_ONCE - 1  # of them, jobs of one tenant


class TenantQueue:
    """The jobs that wait, in the order in which they came, and those that run.

    Requests of several tenants may wait for one job. The tenant with the fewest running jobs is next.
    """

    def __init__(self) -> None:
        self._waiting: dict[bytes, Counter[str]] = {}
        self._tenants: dict[bytes, str] = {}  # of the jobs that run

    def join(self, job: bytes, tenant: str) -> None:
        """A request of the tenant waits for the job."""
        if job not in self._tenants:
            self._waiting.setdefault(job, Counter())[tenant] += 1

    def leave(self, job: bytes, tenant: str) -> bool:
        """The request waits no longer. True if no request waits for the job: it left the queue."""
        requests = self._waiting.get(job)
        if requests is None:
            return False
        requests -= Counter({tenant: 1})
        if not requests:
            del self._waiting[job]
        return not requests

    def begin(self) -> bytes | None:
        """The next job to run; None while none may begin."""
        if len(self._tenants) >= AT_ONCE:
            return None
        running = Counter(self._tenants.values())
        charged = {job: min(requests, key=running.__getitem__) for job, requests in self._waiting.items()}
        allowed = [job for job, tenant in charged.items() if running[tenant] < OF_A_TENANT]
        if not allowed:
            return None
        job = min(allowed, key=lambda job: running[charged[job]])
        del self._waiting[job]
        self._tenants[job] = charged[job]
        return job

    def end(self, job: bytes) -> None:
        """The job ended."""
        del self._tenants[job]
