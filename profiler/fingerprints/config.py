"""The config.json of a model with fewer hidden layers and otherwise unchanged."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from profiler.architectures.description import Description
from profiler.architectures.registry import describe
from profiler.config_corrections import corrected
from profiler.errors import CheckpointError

LAYER_COUNTS = ("num_hidden_layers", "n_layer")
# Keys with an entry per layer; a fingerprint keeps the first entries.
PER_LAYER = ("layer_types",)
# Keys with the number of the first layer that differs; any number beyond the last layer means the same.
FIRST_LAYERS = ("max_window_layers",)


def fingerprint_config(config: Mapping[str, Any], layers: int, where: Path | None = None) -> dict[str, Any]:
    """`config` reduced to its first `layers` hidden layers, from 1 up to all of them.

    Raises CheckpointError for a config that cannot be served (`where` is its path), in particular if its
    layers do not have the same weights, and for an impossible number of layers.
    """
    where = where or Path("config.json")
    described = describe(config, where)
    if type(layers) is not int or not 1 <= layers <= described.layers:
        raise CheckpointError(
            f"{where}: expected a fingerprint of at most the model's {described.layers} layers, got "
            f"{layers!r}"
        )
    made = copy.deepcopy(corrected(config))
    made.update({key: layers for key in LAYER_COUNTS if made.get(key) is not None})
    made.update({key: made[key][:layers] for key in PER_LAYER if made.get(key) is not None})
    made.update({key: min(made[key], layers) for key in FIRST_LAYERS if made.get(key) is not None})
    _check(replace(described, layers=layers), describe(made, where), where)
    return made


def _check(wanted: Description, made: Description, where: Path) -> None:
    """Check that only the number of layers, and which of them have windows, differ."""
    if replace(made, window=wanted.window) != wanted:
        raise CheckpointError(
            f"{where}: with fewer layers this config describes another model; report this config as a defect"
        )
