"""The path of a request: workers and connections to them, who waits, metrics. It asks traffic/ and routing/."""
