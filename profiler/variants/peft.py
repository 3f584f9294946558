"""What all PEFT folders share: their two files, their names for modules, and what we refuse.

Nothing in a folder is executed: `.bin` files (pickle) are refused, and regular expressions are compiled but
never run, because a hostile expression could run forever. The tensors themselves show which modules are
adapted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiler.advice import adapter_from_pickle
from profiler.errors import AdapterError, CheckpointError
from profiler.files import is_file, shown
from profiler.types import ModelSpec, TensorRef
from profiler.variants.modules import layer_of
from profiler.variants.odd_names import CONFIG, MERGE, MERGE_TOKENS, WEIGHTS, meaning
from profiler.variants.types import FileRef
from profiler.weight_files import locate_in

PREFIX = "base_model.model."
MAX_PATTERN = 2_000  # characters of a regular expression: compiling takes time
DEFAULT_TARGETS = ("q_proj", "v_proj")  # PEFT's default for every family with served adapters


def endings(module_name: str) -> set[str]:
    """Every target name by which PEFT can mean this module: its whole name and its last parts."""
    parts = module_name.split(".")
    return {".".join(parts[start:]) for start in range(len(parts))}


def read_weights(folder: Path) -> tuple[dict[str, TensorRef], FileRef]:
    """The tensors of the folder, by PEFT's name, and their file. Raises CheckpointError."""
    if not is_file(folder / WEIGHTS) and is_file(folder / "adapter_model.bin"):
        raise CheckpointError(
            f"{folder} has adapter_model.bin, a pickle, which Ostinato does not read because it can run "
            f"code; write its tensors to {WEIGHTS}: "
            f"{adapter_from_pickle(folder / 'adapter_model.bin', folder / WEIGHTS)}, and register the "
            "adapter again"
        )
    tensors = locate_in(folder, WEIGHTS)
    return tensors, FileRef(
        WEIGHTS, max((ref.offset + ref.size_bytes for ref in tensors.values()), default=0)
    )


def require_type(raw: Mapping[str, Any], expected: str) -> None:
    """Raise AdapterError for another type of adapter."""
    if raw.get("peft_type") != expected:
        raise AdapterError(f"{CONFIG}: expected peft_type {expected}, got {shown(raw.get('peft_type'))}")


# Options that act on some tokens or requests only, so merged weights cannot represent them.
UNMERGEABLE = frozenset({"alora_invocation_tokens", "arrow_config"})
WITH_TOKENS = frozenset({"modules_to_save", "trainable_token_indices"})  # often set because tokens were added


def refuse_options(raw: Mapping[str, Any], refused: Mapping[str, str]) -> None:
    """Raise AdapterError for any option in `refused` (key: its meaning) that is set."""
    for key, what in refused.items():
        if raw.get(key):
            instead = MERGE_TOKENS if key in WITH_TOKENS else MERGE
            if key in UNMERGEABLE:
                instead = "train an adapter without it, or choose another (a merged model cannot do the same)"
            raise AdapterError(f"{CONFIG}: {key} is set: {what} not served; {instead}")


@dataclass(frozen=True)
class Targets:
    """The modules that PEFT adapts according to the config. `listed` is None if only the tensors show it."""

    listed: frozenset[str] | None
    excluded: frozenset[str] = frozenset()
    layers: frozenset[int] | None = None

    def problem(self, module_name: str) -> str | None:
        """Why PEFT would ignore the tensors of this module, and what to write in the config."""
        ends, layer = endings(module_name), layer_of(f"{module_name}.weight")
        if self.listed is not None and not self.listed & ends:
            last = module_name.rpartition(".")[2]
            return f'target_modules does not name it; add "{last}" to target_modules'
        if left_out := self.excluded & ends:
            return f'exclude_modules names it; remove "{min(left_out)}" from exclude_modules'
        if self.layers is not None and layer not in self.layers:
            return f"layers_to_transform leaves its layer out; add {layer} to layers_to_transform"
        return None


def parse_targets(raw: Mapping[str, Any]) -> Targets:
    """What the config says about modules. The tensors show which modules are adapted: a target without
    tensors was not in the trained model, or was excluded. Raises AdapterError."""
    value, excluded, layers = (
        raw.get(key) for key in ("target_modules", "exclude_modules", "layers_to_transform")
    )
    if isinstance(value, str) and value:
        if value != "all-linear":
            _check_regex(value)
        return Targets(None)
    if value is None:
        value = DEFAULT_TARGETS
    if not isinstance(value, list | tuple) or not value or not all(isinstance(item, str) for item in value):
        raise AdapterError(
            f"{CONFIG}: expected target_modules to be a list of names or a pattern, got {shown(value)}; "
            "write the names of the modules that were trained, such as q_proj"
        )
    names = excluded if isinstance(excluded, list) and all(isinstance(n, str) for n in excluded) else []
    numbers = layers if isinstance(layers, list) else [layers]
    known = [number for number in numbers if type(number) is int]
    return Targets(frozenset(value), frozenset(names), frozenset(known) or None)


def _check_regex(pattern: str) -> None:
    try:
        if len(pattern) > MAX_PATTERN:
            raise ValueError(f"longer than {MAX_PATTERN} characters")
        re.compile(pattern)
    except (ValueError, re.error, RecursionError, OverflowError) as error:
        raise AdapterError(
            f"{CONFIG}: target_modules is not a valid regular expression ({error}); correct it"
        ) from error


def check_targets(targets: Targets, adapted: Iterable[str]) -> None:
    """Raise AdapterError if the config does not cover an adapted module: PEFT applies every tensor of a
    file."""
    for name in adapted:
        if problem := targets.problem(name):
            raise AdapterError(
                f"{WEIGHTS}: {name} has weights, but PEFT would leave them out, because in {CONFIG} "
                f"{problem}, and register the adapter again"
            )


def require_known(ref: TensorRef, base: ModelSpec) -> None:
    """Raise AdapterError for a tensor of a kind that is not served, and say what it is."""
    if found := meaning(ref, base):
        raise AdapterError(f"{WEIGHTS}: {ref.name[:200]} {found}")
