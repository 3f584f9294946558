"""Shared parts of the tests of controlplane."""
