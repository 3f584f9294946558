"""Requests, gateways and engines on virtual time, with the real policies of the router and the engine."""
