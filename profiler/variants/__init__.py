"""Variants of a base model, read from their folders without loading a weight: one module per kind."""
