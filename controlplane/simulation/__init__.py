"""Requests, gateways and engines on virtual time, over the router's and the engine's own policies."""
