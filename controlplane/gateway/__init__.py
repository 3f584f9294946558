"""The path of a request: workers, connections, the queue, metrics. Uses traffic/ and routing/."""
