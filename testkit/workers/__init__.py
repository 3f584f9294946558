"""Shared parts of the tests of workers."""
