"""Tasks answered by a checkpoint in this process; deployed engines answer tasks over the API."""
