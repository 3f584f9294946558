"""Compute ranks on fragments of GPUs from a deployment's intent: types, policies, an exact reference,
what-if.

Pure: every function takes a snapshot of the cluster and returns new values (docs/placement.md).
"""
