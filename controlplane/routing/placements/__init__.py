"""Where variants belong over time: recomputed every few seconds from what is asked how often."""
