"""How one linear layer is compressed: a module for each method, named as its paper names it."""
