"""What a layer's inputs look like: texts, and the blocks of the model that they are run through."""
