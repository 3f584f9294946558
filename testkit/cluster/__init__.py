"""Shared parts of the tests of cluster."""
