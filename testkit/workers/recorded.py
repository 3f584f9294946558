"""The policy's decision about a snapshot, by way of its records."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from profiler.compiled import Records, records
from testkit.workers.policy_rules import Decision, Snapshot
from workers.scheduling.policy import NOBODY, RUNNING, VARIANTS, WAITING, Rules, decide

LEFT_OVER = 1  # of an earlier decision


def decide_by_records(s: Snapshot) -> Decision:
    running, waiting, variants = _running(s), _waiting(s), _variants(s)
    rules = Rules(s.limit, s.longest_wait_s, s.almost_done_tokens)
    count = decide(s.now_s, running, waiting, variants, rules)

    admitted = np.flatnonzero(waiting["admitted"])
    admit, parents = _list(waiting["key"][admitted]), _list(waiting["parent"][admitted])
    assert count == len(admit)
    load = np.argsort(variants["load"])[len(variants) - np.count_nonzero(variants["load"]) :]
    assert _list(variants["load"][load]) == list(range(1, len(load) + 1))
    return Decision(
        admit=admit,
        parents={key: parent for key, parent in zip(admit, parents, strict=True) if parent != NOBODY},
        preempt=_list(running["key"][running["preempts"] > 0]),
        load=_list(load),
        blocked=_list(waiting["key"][waiting["blocked"] > 0]),
        active=frozenset(_list(np.flatnonzero(variants["active"]))),
        closed=frozenset(_list(np.flatnonzero(variants["closed"]))),
    )


def _running(s: Snapshot) -> Records:
    made = _made(RUNNING, len(s.running))
    for name in ("key", "variant", "arrival_s", "tokens_left"):
        made[name] = [getattr(r, name) for r in s.running]
    made["parent"] = [NOBODY if r.parent is None else r.parent for r in s.running]
    made["preempts"] = LEFT_OVER
    return made


def _waiting(s: Snapshot) -> Records:
    made = _made(WAITING, len(s.waiting))
    for name in ("key", "variant", "arrival_s"):
        made[name] = [getattr(w, name) for w in s.waiting]
    made["admitted"] = made["blocked"] = made["parent"] = LEFT_OVER
    return made


def _variants(s: Snapshot) -> Records:
    made = _made(VARIANTS, 1 + max(s.readiness))
    made["readiness"][list(s.readiness)] = list(s.readiness.values())
    made["cost"][list(s.readiness)] = [s.cost[v] for v in s.readiness]
    made["closed"][list(s.closed)] = 1
    made["load"] = made["active"] = made["parent"] = made["rows"] = made["overdue"] = LEFT_OVER
    return made


def _made(dtype: npt.DTypeLike, count: int) -> Records:
    return records(dtype, count).view(np.ndarray)


def _list(found: npt.NDArray[np.integer]) -> list[int]:
    return [int(number) for number in found]
