"""Devices, what of them is promised, and who uses it. Pure."""
