"""The path of a request: workers, connections, the waiting line, metrics. Uses traffic/ and routing/."""
