"""Shared parts of the tests of kernels."""
