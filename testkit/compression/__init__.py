"""Shared parts of the tests of compression."""
