"""The changes of a profile's record while it is measured, and the operations that wait for it. Pure."""

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

MAX_ATTEMPTS = 3  # in a row without a new result


def with_quantizations(profile: ModelProfile, quantizations: Sequence[str]) -> ModelProfile:
    """The profile, to be measured in these quantizations, too, when it next begins."""
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


def attempted(profile: ModelProfile, job: ProfilingJob, now_s: float) -> ModelProfile:
    return dataclasses.replace(
        profile,
        phase=Phase.PROFILING,
        attempts=profile.attempts + 1,
        all_points=job.points,
        reason=job.beginning,
        updated_at_s=now_s,
    )


def with_line(
    profile: ModelProfile,
    line: str,
    all_points: int,
    seconds: float,
    now_s: float,
    busy: float | None = None,
) -> ModelProfile:
    """The profile with one more measurement; a known measurement changes nothing. `busy`: the share of the
    device's time that other work took in these `seconds`."""
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
        busy=_mean_busy(profile, seconds, busy),
        attempts=0,
        reason=described(line, timed, all_points),
        updated_at_s=now_s,
    )


def _mean_busy(profile: ModelProfile, seconds: float, busy: float | None) -> float | None:
    if busy is None or profile.busy is None:
        return profile.busy if busy is None else busy
    return (profile.busy * profile.seconds + busy * seconds) / max(profile.seconds + seconds, 1e-9)


def described(line: str, points: int, all_points: int) -> str:
    """The message for waiting users."""
    measurement = next(iter(from_lines([line], "a measurement")))
    count = f"{points} of {all_points} loads measured"
    if isinstance(measurement, Footprint):
        layers, start_s = measurement.setting.layers, measurement.start_s
        return f"{count}; an engine with {layers} layers started in {start_s:.0f} s"
    load = f"{measurement.point.batch} x {measurement.point.input_tokens} tokens"
    if measurement.point.mix:
        load += f" of {', '.join(part.label for part in measurement.point.mix)}"
    return f"{count}; {load}: TTFT {measurement.ttft_s * 1e3:.0f} ms, TPOT {measurement.tpot_s * 1e3:.1f} ms"


def done(profile: ModelProfile, job: ProfilingJob, now_s: float) -> ModelProfile:
    """The profile after a successful measurement; resumed if more quantizations were requested."""
    grown = not set(profile.forms) <= set(job.quantizations)
    return resumed(profile, now_s) if grown else ended(profile, "", now_s)


def ended(profile: ModelProfile, problem: str, now_s: float) -> ModelProfile:
    """The profile after its measurement ended, with a `problem` or without ('').

    It is Ready if its measurements are enough for an estimate.
    """
    usable = calibration(profile.measurements) is not None
    if not problem:
        reason = f"{profile.points} loads measured in {profile.seconds:.0f} s"
        return dataclasses.replace(profile, phase=Phase.READY, reason=reason, updated_at_s=now_s)
    kept = f"{profile.points} of {profile.all_points} loads measured before this: " if usable else ""
    phase = Phase.READY if usable else Phase.FAILED
    return dataclasses.replace(profile, phase=phase, reason=kept + problem, updated_at_s=now_s)


def resumed(profile: ModelProfile, now_s: float) -> ModelProfile:
    """The profile, to be measured again for its missing loads."""
    return dataclasses.replace(
        profile, phase=Phase.PENDING, attempts=0, reason="waits to be measured", updated_at_s=now_s
    )


def queued(profile: ModelProfile, reason: str, now_s: float) -> ModelProfile:
    """The profile while it waits for its turn. Waiting is not an attempt, and the same reason changes
    nothing."""
    if (profile.phase, profile.reason) == (Phase.PENDING, reason):
        return profile
    return dataclasses.replace(profile, phase=Phase.PENDING, reason=reason, updated_at_s=now_s)


def preempted(profile: ModelProfile, group_id: str, now_s: float) -> ModelProfile:
    """The profile after a worker group took its memory to be placed again. Its measurements stay, and the
    attempt does not count."""
    return dataclasses.replace(
        profile,
        phase=Phase.PENDING,
        attempts=max(0, profile.attempts - 1),
        reason=f"paused: its memory went to the engine of '{group_id}', which had to be placed again",
        updated_at_s=now_s,
    )


def is_whole(profile: ModelProfile) -> bool:
    """Tell whether all planned loads were measured, in every requested quantization."""
    counted = profile.phase is Phase.READY and 0 < profile.all_points <= profile.points
    return counted and set(profile.forms) <= {UNCOMPRESSED, *_measured_quantizations(profile)}


def _measured_quantizations(profile: ModelProfile) -> set[str]:
    try:
        return {
            measurement.setting.quantization for measurement in from_lines(profile.measurements, profile.key)
        }
    except MeasurementError:  # written by another version
        return set()


def awaited(state: State) -> Iterator[tuple[str, Operation]]:
    """Open operations that wait for a profile, each with the key of that profile: registrations, and requests
    to profile a model."""
    for operation in state.operations.values():
        op = operation.record
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
    """The open operations that wait for the profile of this key."""
    return (op for awaits, op in awaited(state) if awaits == key)


def subject(state: State, key: str) -> Model | None:
    """The oldest model of the profile's shape, whose config is to be measured."""
    having = [m.record for m in state.models.values() if m.record.profile == key and m.record.path]
    return min(having, key=lambda m: (m.created_at_s, m.name), default=None)


def settled_profile(state: State, model: Model) -> ModelProfile | None:
    """The profile that a model waits for, if it is settled."""
    profile = state.profiles.get(model.profile or "")
    return profile.record if profile and profile.record.settled else None
