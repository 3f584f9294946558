"""Shared parts of tests, which benchmarks may use: models, clusters, references, servers."""
