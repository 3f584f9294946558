"""Shared parts of the tests of simulation."""
