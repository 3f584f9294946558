"""Decisions about records: the next action for each, the places of groups, and their number. Pure."""
