"""Corrections of the next plan by the measured memory of ranks. Pure.

A profile keeps, for each TP x PP, the excess of a rank's memory over the estimate in the last deployment. The
next plan of that shape gives each rank this excess. A plan never gives less than the estimate: right after an
engine's start, a full batch's activations may not be in memory yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from controlplane.profiling.calibrations import Profiles, calibration_on
from controlplane.profiling.keys import key_on
from controlplane.settings import Settings
from controlplane.state.records import Model, ModelProfile
from controlplane.state.repository import Change, Put, State
from controlplane.state.worker_groups import MeasuredRank, WorkerGroup
from placement.solver.from_inventory import type_name
from placement.solver.profiled import Measured
from placement.types import CPU, Device, Inventory, Placement, Plan, key_of
from profiler.quantization import UNCOMPRESSED
from workers.messages import RankReport

GIB = 2**30


def measured(reports: Sequence[RankReport]) -> tuple[MeasuredRank, ...]:
    """The measured ranks of one replica, by rank."""
    ranks = (MeasuredRank(r.rank, r.planned_bytes, r.total_bytes) for r in reports)
    return tuple(sorted(ranks, key=lambda r: r.rank))


def describe(ranks: Sequence[MeasuredRank]) -> str:
    """Planned and measured memory of each rank, for the operation's event; may be empty."""
    parts = [
        f"rank {r.rank}: planned {r.planned_bytes / GIB:.2f} GiB, measured {r.measured_bytes / GIB:.2f} GiB"
        for r in ranks
    ]
    return "; ".join(parts)


def known_on(model: Model, device: Device, settings: Settings, profiles: Profiles) -> Measured | None:
    """The calibration on devices like this one, and the extra memory of each rank beyond its estimate.

    None without a calibration: rough estimates get no extra memory, and no correction is learned from them.
    """
    key = key_on(model, device, settings)
    calibration = calibration_on(model, device, settings, profiles)
    if key is None or calibration is None:
        return None
    kept = profiles[key.text].record.memory_excess
    return Measured(calibration, device.rates, {_shape(text): n for text, n in kept.items()})


def applied(
    profiles: Profiles, model: Model, placement: Placement, inventory: Inventory, settings: Settings
) -> int | None:
    """The extra memory that `known_on` gave each rank of a placement on this inventory; None: not
    calibrated."""
    device = only_type(placement, inventory)
    if device and device.kind == CPU and len({type_name(d) for d in inventory.devices if d.kind == CPU}) > 1:
        return None  # hosts share one estimate, from the fastest type
    known = known_on(model, device, settings, profiles) if device else None
    shape = _shape(_text(placement.plan))
    return known.excess.get(shape, 0) if known else None


def memory_correction(
    state: State, base: str, group: WorkerGroup, inventory: Inventory, settings: Settings
) -> list[Change]:
    """The correction of a base's profile by the ranks of a group, if all are on one type of device."""
    model = state.models[base].record
    device = only_type(group.placement, inventory) if group.placement else None
    key = key_on(model, device, settings) if device else None
    profile = state.profiles.get(key.text) if key else None
    calibrated = device is not None and known_on(model, device, settings, state.profiles) is not None
    if profile is None or not calibrated or group.memory_excess is None or not group.measured:
        return []
    improved = corrected(profile.record, group)
    return [] if improved == profile.record else [Put(improved, profile.version)]


def corrected(profile: ModelProfile, group: WorkerGroup) -> ModelProfile:
    """The profile, corrected by a group that was placed by its calibration and has a measured rank."""
    assert group.placement is not None
    assert group.memory_excess is not None
    beyond_plan = max(r.measured_bytes - r.planned_bytes for r in group.measured)
    excess = max(0, group.memory_excess + beyond_plan)
    return replace(profile, memory_excess={**profile.memory_excess, _text(group.placement.plan): excess})


def _text(plan: Plan) -> str:
    """A plan's shape as a profile's key: "2x1" is TP x PP, and "2x1 fp8" the same in another quantization."""
    degrees = f"{plan.tensor_parallel}x{plan.pipeline_parallel}"
    return degrees if plan.quantization == UNCOMPRESSED else f"{degrees} {plan.quantization}"


def _shape(text: str) -> tuple[str, int, int]:
    """(quantization, TP, PP)."""
    degrees, _, quantization = text.partition(" ")
    tp, pp = degrees.split("x")
    return quantization or UNCOMPRESSED, int(tp), int(pp)


def only_type(placement: Placement, inventory: Inventory) -> Device | None:
    """A device of the type that all ranks use; None if there are several types, or a node does not report."""
    devices = {key_of(d): d for d in inventory.devices}
    used = [devices.get(r.device) for r in placement.ranks]
    types = {(d.kind, d.model, d.engine) if d else None for d in used}
    return used[0] if len(types) == 1 else None
