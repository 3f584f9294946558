"""Deployments are decided by the profile of the type of device they would run on, or the nearest there is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from controlplane import errors
from controlplane.cluster.reservations import busy_with_others, measuring
from controlplane.planning.placement_decision import decide
from controlplane.profiling.calibrations import ClusterMeasurements
from controlplane.profiling.keys import key_on
from controlplane.profiling.progress import fresh_profile, with_line
from controlplane.settings import Settings
from controlplane.state.records import Deployment, Model, ModelProfile, Phase
from controlplane.state.repository import Versioned
from placement.types import Device, Intent, Inventory, Placement, Slos, key_of
from profiler.measurements import to_line
from profiler.types import Basis, DeviceRates
from testkit.known_models import LLAMA_7B
from testkit.simulated_profile import RATES, measurements

GIB = 1 << 30
MODEL = Model("m", 1, Phase.READY, path="/m", spec=LLAMA_7B)
SETTINGS = Settings(home=Path("/nowhere"), max_model_len=2048, concurrency=4)
QUICK = Device("a", 0, "h200", 140 * GIB, 140 * GIB, RATES, "h200", "0.26")
HALF = DeviceRates(RATES.memory_bytes_per_s / 2, RATES.flops_per_s / 2)
SLOW = Device("b", 0, "half", 140 * GIB, 140 * GIB, HALF, "half", "0.26")


def profiles(device: Device) -> dict[str, Versioned[ModelProfile]]:
    """Figures of a formula as measurements of such a device."""
    key = key_on(MODEL, device, SETTINGS)
    assert key is not None
    lines = tuple(to_line(one) for one in measurements())
    found = ModelProfile(**{**vars(fresh_profile(key, 0.0)), "measurements": lines, "phase": Phase.READY})
    return {key.text: Versioned(found, 1)}


def placed(*devices: Device, known: Device | None = None) -> Placement:
    wanted = Deployment("m", 1, "m", Phase.PENDING, Intent.MIN_LATENCY, 64)
    return decide(
        MODEL, wanted, Inventory(devices), SETTINGS, (), ClusterMeasurements(profiles(known) if known else {})
    )


def test_an_estimate_from_its_own_profile_is_certain() -> None:
    rough, known = placed(QUICK), placed(QUICK, known=QUICK)
    assert (rough.estimate.basis, known.estimate.basis) == (Basis.ROUGH, Basis.PROFILE)
    assert rough.choice.tpot is not None
    assert known.choice.tpot is not None
    assert (
        known.choice.tpot.high / known.choice.tpot.low < 1.4 < rough.choice.tpot.high / rough.choice.tpot.low
    )
    assert "from its profile" in known.reason


def test_a_type_that_was_not_measured_is_scaled_from_one_that_was() -> None:
    """The roofline of the device does not count: it would make the device seem quicker than the measured
    one."""
    own, scaled = placed(QUICK, known=QUICK), placed(SLOW, known=None)
    assert scaled.estimate.basis is Basis.ROUGH
    without_room = Device(**{**vars(QUICK), "free_bytes": 0})
    scaled = placed(without_room, SLOW, known=QUICK)
    assert scaled.ranks[0].device_kind == "half"
    assert scaled.estimate.tpot_s == pytest.approx(2 * own.estimate.tpot_s)
    assert any("was not measured" in note for note in scaled.choice.notes)
    assert placed(QUICK, SLOW, known=QUICK).ranks[0].device_kind == "h200"


def test_a_profile_of_another_engine_is_another() -> None:
    newer = Device(**{**vars(QUICK), "engine": "0.32"})
    assert placed(newer, known=QUICK).estimate.basis is Basis.ROUGH


def refused(busy: float | None, slos: Slos) -> str:
    """The refusal where these limits cannot be kept, by a profile measured while others had this share."""
    ((key, versioned),) = profiles(QUICK).items()
    known = {key: Versioned(replace(versioned.record, busy=busy, updated_at_s=1e9), 1)}
    wanted = Deployment("m", 1, "m", Phase.PENDING, Intent.MIN_LATENCY, 64, slos)
    here = Inventory((replace(QUICK, load=0.02),))
    with pytest.raises(errors.NoFeasiblePlan) as refusal:
        decide(MODEL, wanted, here, SETTINGS, (), ClusterMeasurements(known))
    return refusal.value.message


def test_a_refusal_by_a_profile_measured_under_load_mentions_the_load() -> None:
    said = refused(0.63, Slos(tpot_s=1e-6))
    assert said.endswith(
        "; the profile of 'm' (measured until 2001-09-09 01:46 UTC) may show too long times: other work took"
        " 63% of the device's time, and the device is 2% busy now; measure again on an idle device"
        " (`ostinato profile m --again`)"
    )
    assert "measured until" in refused(0.63, Slos(ttft_s=1e-6))
    assert "measured until" not in refused(0.63, Slos(accuracy=101.0)), "no matter of time"
    for quiet in (0.05, None):
        assert "measured until" not in refused(quiet, Slos(tpot_s=1e-6))


def test_a_profile_keeps_how_much_of_the_time_others_had_meanwhile() -> None:
    """The measuring's own work is no other's, nor is that of devices which it has not."""
    device = replace(QUICK, load=0.9, work=((measuring("k"), 0.6), ("other", 0.2)))
    everywhere = Inventory((device, replace(SLOW, load=1.0)))
    assert busy_with_others(everywhere, {key_of(device)}, "k") == pytest.approx(0.3)
    assert busy_with_others(Inventory((SLOW,)), {key_of(device)}, "k") is None
    key = key_on(MODEL, QUICK, SETTINGS)
    assert key is not None
    first, second, third = (to_line(one) for one in measurements()[:3])
    profile = with_line(fresh_profile(key, 0.0), first, 3, 10.0, 1.0, 0.3)
    profile = with_line(profile, second, 3, 30.0, 2.0, 0.7)
    assert profile.busy == pytest.approx(0.6)
    assert with_line(profile, third, 3, 5.0, 3.0).busy == pytest.approx(0.6)
