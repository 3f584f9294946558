"""Measures how a (shrunk) model runs in the real engine, in a process of its own: see `__main__`."""
