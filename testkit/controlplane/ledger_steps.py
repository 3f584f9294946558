"""The ledger after changes."""

from __future__ import annotations

from dataclasses import replace

from controlplane.state.records import NodeLedger
from controlplane.state.repository import Delete, Put, State, Versioned


def after(state: State, changes: list[Put | Delete]) -> State:
    """The state once the changes are committed, as a store would have it."""
    ledgers = dict(state.ledgers)
    for change in changes:
        key = change.record.node if isinstance(change, Put) else change.key  # type: ignore[union-attr]
        assert change.expected_version == (ledgers[key].version if key in ledgers else 0)
        ledgers.pop(key, None)
        if isinstance(change, Put):
            assert isinstance(change.record, NodeLedger)
            ledgers[key] = Versioned(change.record, state.revision + 1)
    return replace(state, revision=state.revision + 1, ledgers=ledgers)
