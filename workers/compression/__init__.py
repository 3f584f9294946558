"""Compressing a fine-tune against its base, layer by layer, with the error measured.

A method (`methods/`) compresses one linear layer; a job walks the layers with what calibration saw of their
inputs. docs/compression.md says how to use it and how it works.
"""
