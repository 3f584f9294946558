"""Descriptions of models by their config.json: one module per group of families, and `registry.describe`."""
