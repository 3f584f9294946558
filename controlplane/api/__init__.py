"""The HTTP edge: schemas, routes and error bodies."""
