"""Variants' weights as tensors: coding, decoding and writing deltas, and merging variants into a base.

For standalone commands (`ostinato compress`, `ostinato merge`) and as the reference for the engine's kernels.
The formats are in `profiler.variants` and docs/formats.md.
"""
