"""Which profiles there are, what is measured next, where, and what was learned. Pure."""
