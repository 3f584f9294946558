"""The shared parts of tests of deploy."""
