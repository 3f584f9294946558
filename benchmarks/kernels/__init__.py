"""Speed of the kernels that variants add to a base's layers: `python -m benchmarks.kernels`."""
