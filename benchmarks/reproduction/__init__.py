"""Figures of papers, again, on virtual time: MaverIQ's 8 and 10 to 14, DeltaZip's 11 to 13 and 19.

What decides is the product's: placement policies (`placement/solver`), the estimates of a model's steps, the
engine's scheduling and the simulator of it. benchmarks/results/reproduction.md compares the outcome with the
papers' claims.
"""
