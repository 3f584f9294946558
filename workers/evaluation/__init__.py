"""Tasks answered by a checkpoint in this process, beside what deployed engines answer over the API."""
