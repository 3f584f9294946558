"""The known request path of this cluster. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from controlplane import __version__
from controlplane.settings import Settings
from controlplane.state.records import PathProfile
from controlplane.state.repository import State
from placement.types import Device
from profiler.request_path import RequestPath

LACKING = (
    "the time of the request path (proxy, gateway, engine's HTTP server) is assumed, within a factor of "
)
"three: it "
NOT_YET = f"{LACKING}is measured once an engine serves"


def path_key(settings: Settings, devices: Iterable[Device]) -> str:
    """The key of the request path, for devices that placement may use (`inventory_of`); empty where the
    path is not measured, and without devices."""
    engines = [device.engine for device in devices]
    if not _is_measured(settings) or not engines:
        return ""
    engine = max(engines, key=_numbers)
    # Paths measured behind Serve's Python proxy, which earlier versions used, have other keys.
    return f"{__version__}_vllm-{engine or 'unknown'}_haproxy_{settings.gateway_replicas}"


def _is_measured(settings: Settings) -> bool:
    return settings.measures


def _numbers(version: str) -> tuple[int, ...]:
    """The version's numbers, so that 0.10 comes after 0.9."""
    return tuple(map(int, re.findall(r"\d+", version)))


def known_path(state: State, settings: Settings, devices: Iterable[Device]) -> RequestPath | None:
    entry = state.paths.get(path_key(settings, devices))
    return entry.record.path if entry else None


def note(state: State, settings: Settings, devices: Iterable[Device]) -> str:
    """The reason why an estimate assumes the request path; empty where it was measured."""
    entry = state.paths.get(path_key(settings, devices))
    if not _is_measured(settings):
        return f"{LACKING}is not measured here (OSTINATO_PROFILE_SECONDS, OSTINATO_ENGINE)"
    if entry is None:
        return NOT_YET
    return (
        ""
        if entry.record.path
        else f"{LACKING}could not be measured ({entry.record.failed.reason}) and will be measured again"
    )


def measured(key: str, path: RequestPath, now_s: float) -> PathProfile:
    return PathProfile(key, path, measured_at_s=now_s)
