"""The profiles: which exist, which is measured next, where, and their results. Pure."""
