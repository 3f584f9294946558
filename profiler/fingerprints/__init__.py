"""MaverIQ's fingerprints (section 5.1): the model with fewer hidden layers, measured instead of the model.

A different thing is `profiler.checkpoint_digest`, the digest that connects a delta to its base.
"""
