"""How a profile comes about: what each event makes of its record, and who waits for it. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from controlplane.profiling.calibrations import calibration
from controlplane.profiling.job import ProfilingJob
from controlplane.state.records import Model, ModelProfile, Operation, OperationKind, Phase
from controlplane.state.repository import State
from profiler.errors import MeasurementError
from profiler.measurements import Footprint, Timing, from_lines
from profiler.profile_key import ProfileKey
from profiler.quantization import UNCOMPRESSED

MOST_ATTEMPTS = 3  # in a row that bring nothing new


def with_quantizations(profile: ModelProfile, quantizations: Sequence[str]) -> ModelProfile:
    """To be measured in these as well, from the next time it is begun."""
    every = tuple(sorted({*profile.forms, *quantizations}))
    return profile if every == profile.forms else dataclasses.replace(profile, forms=every)


def fresh_profile(key: ProfileKey, now_s: float, quantizations: tuple[str, ...] = ()) -> ModelProfile:
    return ModelProfile(
        key.text,
        key.architecture,
        key.dtype,
        key.device,
        key.engine_version,
        Phase.PENDING,
        reason="waits to be measured",
        created_at_s=now_s,
        updated_at_s=now_s,
        forms=quantizations,
    )


def attempted(profile: ModelProfile, task: ProfilingJob, now_s: float) -> ModelProfile:
    return dataclasses.replace(
        profile,
        phase=Phase.PROFILING,
        attempts=profile.attempts + 1,
        all_points=task.points,
        reason=task.beginning,
        updated_at_s=now_s,
    )


def with_line(
    profile: ModelProfile, line: str, all_points: int, seconds: float, now_s: float
) -> ModelProfile:
    """The profile with one more measurement; what it holds already changes nothing."""
    if line in profile.measurements:
        return profile
    lines = (*profile.measurements, line)
    timed = sum(isinstance(m, Timing) for m in from_lines(lines, profile.key))
    return dataclasses.replace(
        profile,
        measurements=lines,
        points=timed,
        all_points=all_points,
        seconds=profile.seconds + seconds,
        attempts=0,
        reason=described(line, timed, all_points),
        updated_at_s=now_s,
    )


def described(line: str, points: int, all_points: int) -> str:
    """For people who wait."""
    found = next(iter(from_lines([line], "a measurement")))
    count = f"{points} of {all_points} loads measured"
    if isinstance(found, Footprint):
        return f"{count}; an engine of {found.setting.layers} layers started in {found.start_s:.0f} s"
    load = f"{found.point.batch} x {found.point.input_tokens} tokens"
    if found.point.mix:
        load += f" of {', '.join(one.label for one in found.point.mix)}"
    return f"{count}; {load}: TTFT {found.ttft_s * 1e3:.0f} ms, TPOT {found.tpot_s * 1e3:.1f} ms"


def done(profile: ModelProfile, task: ProfilingJob, now_s: float) -> ModelProfile:
    """What is left by a measuring that had no problem: it goes on if more quantizations were asked for
    meanwhile."""
    grown = not set(profile.forms) <= set(task.quantizations)
    return resumed(profile, now_s) if grown else ended(profile, "", now_s)


def ended(profile: ModelProfile, problem: str, now_s: float) -> ModelProfile:
    """What a measuring that ended so leaves: Ready if an estimate can be made from it. '' is no problem."""
    usable = calibration(profile.measurements) is not None
    if not problem:
        reason = f"{profile.points} loads measured in {profile.seconds:.0f} s"
        return dataclasses.replace(profile, phase=Phase.READY, reason=reason, updated_at_s=now_s)
    kept = f"{profile.points} of {profile.all_points} loads measured, then: " if usable else ""
    phase = Phase.READY if usable else Phase.FAILED
    return dataclasses.replace(profile, phase=phase, reason=kept + problem, updated_at_s=now_s)


def resumed(profile: ModelProfile, now_s: float) -> ModelProfile:
    """To be measured once more, what is lacking."""
    return dataclasses.replace(
        profile, phase=Phase.PENDING, attempts=0, reason="waits to be measured", updated_at_s=now_s
    )


def queued(profile: ModelProfile, reason: str, now_s: float) -> ModelProfile:
    """Not its turn. That is no attempt, and changes nothing while the reason is the same."""
    if (profile.phase, profile.reason) == (Phase.PENDING, reason):
        return profile
    return dataclasses.replace(profile, phase=Phase.PENDING, reason=reason, updated_at_s=now_s)


def preempted(profile: ModelProfile, group: str, now_s: float) -> ModelProfile:
    """Its memory goes to a worker group that had to be placed anew. What was measured is kept, and that it
    was begun is no attempt."""
    return dataclasses.replace(
        profile,
        phase=Phase.PENDING,
        attempts=max(0, profile.attempts - 1),
        reason=f"gave its memory to the engine of '{group}', which had to be placed anew; goes on later",
        updated_at_s=now_s,
    )


def is_whole(profile: ModelProfile) -> bool:
    """Whether everything that was planned has been measured, in every quantization that was asked for."""
    counted = profile.phase is Phase.READY and 0 < profile.all_points <= profile.points
    return counted and set(profile.forms) <= {UNCOMPRESSED, *_measured_quantizations(profile)}


def _measured_quantizations(profile: ModelProfile) -> set[str]:
    try:
        return {one.setting.quantization for one in from_lines(profile.measurements, profile.key)}
    except MeasurementError:  # written by another version
        return set()


def awaited(state: State) -> Iterator[tuple[str, Operation]]:
    """Open operations that a profile's end will end, registrations and profiles asked for, with its key."""
    for found in state.operations.values():
        op = found.record
        if op.done or op.cancel_requested:
            continue
        model = state.models.get(op.target)
        if model is None or not model.record.profile:
            continue
        if op.kind is OperationKind.PROFILE or (
            op.kind is OperationKind.REGISTER and model.record.phase is Phase.PROFILING
        ):
            yield model.record.profile, op


def waiting(state: State, key: str) -> Iterator[Operation]:
    """Those that wait for this one."""
    return (op for awaits, op in awaited(state) if awaits == key)


def subject(state: State, key: str) -> Model | None:
    """A model of the profile's shape, whose config is to be measured; the oldest."""
    having = [m.record for m in state.models.values() if m.record.profile == key and m.record.path]
    return min(having, key=lambda m: (m.created_at_s, m.name), default=None)


def settled_profile(state: State, model: Model) -> ModelProfile | None:
    """The profile that a model waits for, if there is nothing more to wait for."""
    found = state.profiles.get(model.profile or "")
    return found.record if found and found.record.settled else None
