"""Several models on the GPUs of one host, placed by the control plane without Ray: see `__main__`."""
