"""Routing policies to compare with, one per file: `pick(snapshot, request, state)` returns a group's index,
or -1 for none.

Each file names its source. `choose` lists the policies. The first is `controlplane.routing.least_harm`, the
policy that gateways run.
"""
