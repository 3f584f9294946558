"""Durable state: one revisioned compare-and-set store, in a local SQLite file or on Redis (stores.py)."""

from __future__ import annotations

from controlplane.state.base import Changes, Entry, Fenced, Lease, Require, Snapshot, StateStore, Write

__all__ = ["Changes", "Entry", "Fenced", "Lease", "Require", "Snapshot", "StateStore", "Write"]
