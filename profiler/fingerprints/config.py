"""The config.json of a model with fewer hidden layers, everything else as it was."""

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
# Keys with an entry per layer, of which a fingerprint has the first ones.
PER_LAYER = ("layer_types",)
# From which layer on layers are different: beyond the last one is as good as at the last one.
FIRST_LAYERS = ("max_window_layers",)


def fingerprint_config(config: Mapping[str, Any], layers: int, where: Path | None = None) -> dict[str, Any]:
    """`config` with its first `layers` hidden layers: 1, 2 or any number up to those it has.

    Raises CheckpointError for a config that cannot be served (`where` it lies), in particular when its
    layers do not have the same weights, and for an impossible number of layers.
    """
    where = where or Path("config.json")
    described = describe(config, where)
    if type(layers) is not int or not 1 <= layers <= described.layers:
        raise CheckpointError(
            f"{where}: a fingerprint of {layers!r} layers was asked for; the model has {described.layers}"
        )
    made = copy.deepcopy(corrected(config))
    made.update({key: layers for key in LAYER_COUNTS if made.get(key) is not None})
    made.update({key: made[key][:layers] for key in PER_LAYER if made.get(key) is not None})
    made.update({key: min(made[key], layers) for key in FIRST_LAYERS if made.get(key) is not None})
    _check(replace(described, layers=layers), describe(made, where), where)
    return made


def _check(wanted: Description, made: Description, where: Path) -> None:
    """The number of layers, and which of them have windows, are all that may differ."""
    if replace(made, window=wanted.window) != wanted:
        raise CheckpointError(f"{where}: with fewer layers this would be another model; report this config")
