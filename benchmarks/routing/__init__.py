"""Routing policies compared on virtual time (`caraserve`), and what a decision costs (`decisions`)."""
