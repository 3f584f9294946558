"""The inputs of layers: texts, and the model's blocks through which they run."""
