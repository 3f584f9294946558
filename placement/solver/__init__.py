"""From a deployment's intent to ranks on fragments of GPUs: types, policies, an exact reference, what-if.

Pure: every function takes a snapshot of the cluster and returns new values (docs/placement.md).
"""
