"""Shared parts of the tests of api."""
