"""Small real models that come inside Python packages, for machines that reach no model hub.

The URI of one is `bundled://NAME`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from workers.bundled.converting import Progress, silent

# By name, the module that converts it.
MODELS = {"smollm2-135m-instruct": "workers.bundled.smollm2", "gemma-3-270m": "workers.bundled.gemma3"}


def ensure(name: str, cache_dir: Path, progress: Progress = silent) -> Path:
    """The model's Hugging Face folder under `cache_dir`, converted first when it is not there yet.

    Raises KeyError for an unknown name, and FileNotFoundError when its package is not installed.
    """
    folder: Path = import_module(MODELS[name]).ensure(cache_dir, progress)
    return folder
