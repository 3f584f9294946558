"""The time of an engine's step as a function of its batch, for decisions at run time."""
