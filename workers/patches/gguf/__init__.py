"""Changes to gguf, for bundled models."""
