"""Which worker group gets a request, which variants it keeps at hand: pure functions of a snapshot, compiled.

The gateway and the simulator run the same code.
"""
