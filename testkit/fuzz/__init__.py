"""The shared parts of the fuzz tests."""
