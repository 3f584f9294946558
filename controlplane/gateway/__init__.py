"""Workers, connections to them, who waits, metrics: the path of a request. Asks traffic/ and routing/."""
