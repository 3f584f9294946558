"""Small real models inside Python packages, for machines without access to a model hub.

The URI of such a model is `bundled://NAME`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from workers.bundled.converting import Progress, silent

# The module that converts each model, by the model's name.
MODELS = {"smollm2-135m-instruct": "workers.bundled.smollm2", "gemma-3-270m": "workers.bundled.gemma3"}


def ensure(name: str, cache_dir: Path, progress: Progress = silent) -> Path:
    """The model's Hugging Face folder under `cache_dir`, converted at first use.

    Raises KeyError for an unknown name, and FileNotFoundError if its package is not installed.
    """
    folder: Path = import_module(MODELS[name]).ensure(cache_dir, progress)
    return folder
