"""Decisions about each request: what its name and headers mean, whether it waits, where it goes. Pure."""
