"""The key of a profile: an architecture in a dtype, on a kind of device, by a version of the engine.

The values of weights do not affect times, so all checkpoints and fine-tunes of one shape share a profile.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass

from profiler.types import ModelSpec

# Fields of a spec that do not change how an engine runs the model: its fingerprint, its longest context.
NOT_OF_THE_SHAPE = (
    "fingerprint",
    "max_position",
    "layer_shapes",
    "other_shapes",
    "layer_prefix",
    "embedding",
    "head",
)
UNKNOWN = "unknown"
# Version of how engines are set up and measured; raised when earlier measurements are no longer valid.
REVISION = "r4"


@dataclass(frozen=True)
class ProfileKey:
    """`architecture` names a shape (see `architecture_name`); `device` a GPU's or CPU's model."""

    architecture: str
    dtype: str
    device: str
    engine_version: str

    @property
    def text(self) -> str:
        """The key under which the profile is stored; its characters are valid in a file name."""
        parts = (self.architecture, self.dtype, self.device, self.engine_version, REVISION)
        return "_".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-") or UNKNOWN for part in parts)


def profile_key(served: ModelSpec, dtype: str, device: str, engine_version: str) -> ProfileKey:
    """The key of a model as an engine holds it: `served` has the bytes of `dtype`, not of its checkpoint."""
    return ProfileKey(architecture_name(served), dtype, device or UNKNOWN, engine_version or UNKNOWN)


def architecture_name(spec: ModelSpec) -> str:
    """Family, layers x hidden size, and a digest of the whole shape: equal for equal shapes only."""
    shape = {k: v for k, v in dataclasses.asdict(spec).items() if k not in NOT_OF_THE_SHAPE}
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True, default=str).encode()).hexdigest()
    return f"{spec.architecture}-{spec.num_layers}x{spec.hidden_size}-{digest[:10]}"
