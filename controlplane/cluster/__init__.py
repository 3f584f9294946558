"""Devices, their reservations, and their users. Pure."""
