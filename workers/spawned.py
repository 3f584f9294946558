"""Replaces the parent's main module in a spawned process (`workers.imports.quick_children`)."""

from workers.imports import uncollected

with uncollected():
    import vllm.v1.engine.core  # noqa: F401
