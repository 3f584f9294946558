"""What stands in a spawned process for the main module of its parent (`workers.imports.quick_children`)."""

from workers.imports import uncollected

with uncollected():
    import vllm.v1.engine.core  # noqa: F401
