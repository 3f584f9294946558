"""Measures how a model or its fingerprint runs in the real engine, in a separate process (`__main__`)."""
