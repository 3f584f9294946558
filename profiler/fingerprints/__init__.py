"""MaverIQ's fingerprints (section 5.1): the same model with fewer hidden layers, to be measured in its place.

Not to be confused with `profiler.checkpoint_digest`, the mark by which a delta knows its base.
"""
