"""Many variants of one base in one batch: what a vLLM worker process holds of them and does with them.

`kinds/` turns a variant's files into weights per layer; `host` packs them; `device` keeps those that
may run in the arena; `layers` hooks them into vLLM's modules; `manager` is what vLLM calls.
"""
