"""Variants of a base model, read from their folders without loading weights: one module per kind."""
