"""Many variants of one base in one batch: the part of a vLLM worker process that holds and runs them.

`kinds/` turns a variant's files into weights per layer, and `host` packs them. `device` keeps the runnable
variants in the arena, `layers` hooks them into vLLM's modules, and vLLM calls `manager`.
"""
