"""Campaigns against what strangers may send: files, and requests."""
