"""Schemas are given to llguidance that vLLM would give to outlines.

vLLM gives schemas with `patternProperties` to outlines, which ignores them and takes seconds for a small
schema. llguidance follows them, unless two patterns overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from profiler.patches.target import Target

UNSUPPORTED = Target(
    "vllm.v1.structured_output.backend_guidance",
    "has_guidance_unsupported_json_features",
    ("schema",),
    read={"0.26": "4a61ee949bea", "0.32": "4a61ee949bea"},
)


@contextmanager
def llguidance_for_all() -> Iterator[None]:
    """Within the context, vLLM's validation in this process takes llguidance for every schema."""
    put_back = UNSUPPORTED.replace(lambda _: _supported)
    try:
        yield
    finally:
        put_back()


def _supported(schema: object) -> bool:
    """Whether llguidance lacks a feature that the schema needs: never."""
    return False
