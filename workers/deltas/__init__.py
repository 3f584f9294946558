"""Variants' weights as tensors: coding and decoding deltas, writing them, merging variants into a base.

For commands that run by themselves (`ostinato compress`, `ostinato merge`) and as the reference for the
engine's kernels. The formats themselves are in `profiler.variants` and docs/formats.md.
"""
