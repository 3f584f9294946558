"""Compression of fine-tunes: its quality, its time and its parts."""
