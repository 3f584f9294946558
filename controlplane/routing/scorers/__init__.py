"""What counts when a group is chosen, one a file; `total` adds them up. A new scorer is a file and its line
there.

Every scorer is in seconds, summed over requests, so they can be added without weights.
"""
