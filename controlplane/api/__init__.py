"""The HTTP edge: routes and error bodies."""
