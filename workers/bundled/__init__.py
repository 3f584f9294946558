"""Small real models that come inside Python packages, for machines that reach no model hub."""
