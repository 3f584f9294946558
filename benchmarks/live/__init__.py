"""A whole product on this machine with streamed requests at it: what benchmarks of the real thing share."""
