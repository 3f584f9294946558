"""Measurements of the cluster, and calibrations of the estimators from its profiles. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from controlplane.profiling.keys import key_on, profiled_device, served_spec
from controlplane.profiling.request_paths import known_path
from controlplane.settings import Settings
from controlplane.state.records import Model, ModelProfile
from controlplane.state.repository import State, Versioned
from placement.types import Device, Inventory
from profiler.errors import MeasurementError
from profiler.measurements import Timing, from_lines
from profiler.physical.calibrating import calibrate
from profiler.physical.calibration import Calibration
from profiler.request_path import RequestPath
from profiler.types import ModelSpec

BUSY = 0.1  # share of a device's time from which other work is reported
Profiles = Mapping[str, Versioned[ModelProfile]]


@dataclass(frozen=True)
class ClusterMeasurements:
    """Measurements of the cluster: architectures by their profile's key, and the request path."""

    profiles: Profiles = field(default_factory=dict)
    path: RequestPath | None = None


NO_MEASUREMENTS = ClusterMeasurements()


def measurements_of(state: State, settings: Settings, devices: Iterable[Device]) -> ClusterMeasurements:
    return ClusterMeasurements(state.profiles, known_path(state, settings, devices))


def calibration_for(
    model: Model, inventory: Inventory, settings: Settings, profiles: Profiles
) -> Calibration | None:
    """The calibration of this model's shape on the representative device; None if nothing was measured."""
    device = profiled_device(inventory)
    return None if device is None else calibration_on(model, device, settings, profiles)


def calibration_on(
    model: Model, device: Device, settings: Settings, profiles: Profiles
) -> Calibration | None:
    """The calibration of this model's shape on devices like this one; None if nothing was measured."""
    key = key_on(model, device, settings)
    profile = profiles.get(key.text) if key else None
    if key is None or profile is None or model.spec is None:
        return None
    known = calibration(profile.record.measurements)
    return known(served_spec(model.spec, key.dtype)) if known else None


def measured_while_busy(model: Model, inventory: Inventory, settings: Settings, profiles: Profiles) -> str:
    """A warning for a profile that was measured while other work used the device; "": none."""
    device = profiled_device(inventory)
    key = key_on(model, device, settings) if device is not None else None
    found = profiles.get(key.text) if key else None
    if device is None or found is None or (found.record.busy or 0.0) < BUSY:
        return ""
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(found.record.updated_at_s))
    return (
        f"the profile of '{model.name}' (measured until {when}) may show too long times: other work took"
        f" {found.record.busy:.0%} of the device's time, and the device is {device.load:.0%} busy now; "
        f"measure again on an idle device (`ostinato profile {model.name} --again`)"
    )


@dataclass(frozen=True)
class _Calibrator:
    lines: tuple[str, ...]

    def __call__(self, spec: ModelSpec) -> Calibration:
        return calibrate(spec, from_lines(self.lines, "a profile"))


@lru_cache(maxsize=256)
def calibration(lines: tuple[str, ...]) -> _Calibrator | None:
    """A fit to these measurements, as a function of a spec; None when they are too few for a fit."""
    try:
        timings = [m for m in from_lines(lines, "a profile") if isinstance(m, Timing)]
    except MeasurementError:
        return None
    whole = [t for t in timings if len(t.setting.layers_per_stage) == 1 and not t.point.mix]
    one_step = len({t.setting.batched_tokens for t in timings}) == 1
    return _Calibrator(lines) if whole and one_step else None
