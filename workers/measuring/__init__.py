"""Measures how a model or its fingerprint runs in the real engine, in a process of its own (`__main__`)."""
