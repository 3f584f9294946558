"""Ostinato's control plane: one base line, many variations."""

__version__ = "0.2.0"
