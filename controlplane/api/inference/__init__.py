"""One inference request: its body, the engine's call, the record of it, and its answer."""
