"""Measures plans of whole models, and their fingerprints, on the GPUs of one host: see `__main__`."""
