"""Which engine runs on which GPUs of a host, and when. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.profiling.tasks import Kind, Task
from profiler.physical.calibration import Cut

PREPARE_S = 50.0  # of importing from a cold disk; later hidden behind whatever measures on the same GPUs


@dataclass(frozen=True)
class Slot:
    """`task` has these GPUs from `begin_s` to `end_s`, both expected."""

    task: Task
    gpus: tuple[int, ...]
    begin_s: float
    end_s: float


def pack(
    tasks: Iterable[Task], gpus: int, budget_s: float, kinds_first: bool = False
) -> tuple[list[Slot], list[Task]]:
    """Slots in the order they begin, and the tasks that would not end within `budget_s`, or that could not be
    predicted without a fingerprint that would not.

    The order is tier by tier, then shape by shape (in the order given), a shape's fingerprints first; with
    `kinds_first` the fingerprints of all shapes before anything else. Among these, tasks on most GPUs go
    first, then the longest: list scheduling, so that short tasks on few GPUs fill the rest. GPUs of a slot
    are neighbours (0-1, 2-3), as pairs are wired alike. Raises ValueError for a task that needs more GPUs
    than there are.
    """
    free_s, slots, left = [PREPARE_S] * gpus, list[Slot](), list[Task]()
    for task in in_order(tasks, kinds_first):
        if task.gpus > gpus:
            raise ValueError(f"{task.label} needs {task.gpus} GPUs, the host has {gpus}")
        groups = [tuple(range(i, i + task.gpus)) for i in range(0, gpus - task.gpus + 1, task.gpus)]
        begin_s, group = min((max(free_s[gpu] for gpu in group), group) for group in groups)
        end_s = begin_s + task.expected_s
        if end_s > budget_s or any(lacks(task, other) for other in left):
            left.append(task)
            continue
        slots.append(Slot(task, group, begin_s, end_s))
        for gpu in group:
            free_s[gpu] = end_s
    return sorted(slots, key=lambda slot: (slot.begin_s, slot.gpus)), left


def in_order(tasks: Iterable[Task], kinds_first: bool = False) -> list[Task]:
    tasks, kinds = list(tasks), list(Kind)
    groups = list(dict.fromkeys((task.shape, task.setting.quantization) for task in tasks))

    def rank(task: Task) -> tuple[float, ...]:
        group = groups.index((task.shape, task.setting.quantization))
        kind = kinds.index(task.kind)
        first = kind * kinds_first
        return first, task.tier, group, kind, -task.gpus, -task.expected_s

    return sorted(tasks, key=rank)


def lacks(task: Task, left: Task) -> bool:
    """Whether `left` is a fingerprint without which `task` cannot be predicted: layers cut and stored alike,
    or any pipeline for a pipeline."""
    if task.kind is Kind.FINGERPRINTS or left.kind is not Kind.FINGERPRINTS or task.shape != left.shape:
        return False
    stages = len(left.setting.layers_per_stage)
    if stages > 1:
        return len(task.setting.layers_per_stage) > 1
    return Cut.of(task.setting) == Cut.of(left.setting)


def cores_of(gpus: Iterable[int], host_gpus: int, cores: Iterable[int]) -> frozenset[int]:
    """The cores for an engine on these GPUs: each GPU of the host has its share, so that engines that start
    do not slow down those that are measured. All of them where there are fewer than GPUs."""
    ordered = sorted(cores)
    share = len(ordered) // host_gpus
    if not share:
        return frozenset(ordered)
    return frozenset(core for gpu in gpus for core in ordered[gpu * share : (gpu + 1) * share])


def before(slots: Sequence[Slot], number: int) -> set[int]:
    """The slots that must have ended before this one may touch its GPUs: on each the last one."""
    found = set()
    for gpu in slots[number].gpus:
        earlier = [i for i in range(number) if gpu in slots[i].gpus]
        found |= {earlier[-1]} if earlier else set()
    return found


def describe(slots: Sequence[Slot], left: Sequence[Task], gpus: int) -> str:
    """A line for each slot, and what the whole comes to."""
    lines = [
        f"{slot.begin_s:5.0f} to {slot.end_s:4.0f} s on {','.join(map(str, slot.gpus)):7} {slot.task.label}"
        for slot in slots
    ]
    end_s = max((slot.end_s for slot in slots), default=0.0)
    busy_s = sum((slot.end_s - slot.begin_s) * len(slot.gpus) for slot in slots)
    share = busy_s / (end_s * gpus) if end_s else 0.0
    lines.append(f"{len(slots)} engines in {end_s:.0f} s on {gpus} GPUs, {100 * share:.0f}% of them taken")
    if left:
        lines.append(f"{len(left)} do not fit the budget: {', '.join(task.label for task in left)}")
    return "\n".join(lines)
