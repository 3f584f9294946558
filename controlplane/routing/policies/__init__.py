"""Routing policies, one a file: `pick(snapshot, request, state)` gives a group's index, or -1 for none.

`controlplane.routing.policies.choose` has the list of them. Ours is `least_harm`; the others are named after
what they stand for.
"""
