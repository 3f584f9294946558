"""Where variants belong over time: recomputed every few seconds from the rates of requests."""
