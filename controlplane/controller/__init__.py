"""Observes the engines, asks planning/ for the next actions, and carries them out; keeps no state."""
