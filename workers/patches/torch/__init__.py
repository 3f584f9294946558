"""Changes to torch."""
