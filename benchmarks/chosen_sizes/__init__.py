"""A model deployed by its name and an intent, on one host without Ray: see `__main__`."""
