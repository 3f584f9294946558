"""Shared parts of the tests of client."""
