"""Observes the engines, asks planning/ what is next, and carries it out; holds nothing."""
