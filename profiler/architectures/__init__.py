"""What config.json says of a model: one module per group of families, `registry.describe` for all of them."""
