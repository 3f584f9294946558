"""The costs that decide the choice of a group, one per file; `total` sums them. A new scorer needs a file and
a line there.

Every scorer is in seconds, summed over requests, so they can be added without weights.
"""
