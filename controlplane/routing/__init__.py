"""Choose the worker group of a request, and the variants that each group keeps ready. Compiled.

These are pure functions of a snapshot. The gateway and the simulator run the same code.
"""
