"""What tests share, and benchmarks may use: models, clusters, references, servers."""
