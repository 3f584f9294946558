"""Changes to Jinja."""
