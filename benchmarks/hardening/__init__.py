"""Attacks on a real local cluster, and what it does meanwhile."""
