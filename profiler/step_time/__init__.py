"""How long a step of an engine takes, as a function of what is in its batch: for decisions at run time."""
