"""Placement policies to compare with: MaverIQ's, and an exact program for small clusters."""
