"""Changes to transformers."""
