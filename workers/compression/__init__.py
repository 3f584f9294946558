"""Compresses a fine-tune against its base, layer by layer, and measures the error.

A method (`methods/`) compresses one linear layer. A job walks the layers with the statistics of their inputs
from calibration. docs/compression.md explains the use and the design.
"""
