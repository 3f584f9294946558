"""The places where a variant can be."""

from __future__ import annotations

from enum import StrEnum


class Tier(StrEnum):
    """The nearest place where every rank has a variant."""

    DEVICE = "device"  # in a slot: requests for it run
    HOST = "host"  # in host memory: a copy away from a slot
    DISK = "disk"  # must be read again
