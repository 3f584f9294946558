"""The code that runs next to the model: the engine, the worker around it, and our vLLM plug-in."""
