"""What adapter_config.json should say about an adapter's ranks, by the shapes of its tensors."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from profiler.errors import CheckpointError
from profiler.weight_files import locate_in

MAX_SHOWN = 8  # entries of a pattern, or modules
_A = re.compile(r"base_model\.model\.(?:model\.)?([\w.]{1,100})\.lora_A\.weight", re.ASCII)


def stored_ranks(folder: Path, weights: str) -> dict[str, int]:
    """The rank of each module in the file `weights`; none if the file cannot be read."""
    try:
        tensors = locate_in(folder, weights)
    except CheckpointError:
        return {}
    named = ((_A.fullmatch(name), ref.shape) for name, ref in tensors.items())
    return {match[1]: shape[0] for match, shape in named if match and len(shape) == 2}


def ranks_as_config(ranks: Mapping[str, int]) -> str:
    """The keys `r` and `rank_pattern` for modules of these ranks: `r` is the most frequent rank."""
    if not ranks:
        return '"rank_pattern" with each module and its rank, the first number in the shape of its lora_A'
    usual, _ = Counter(ranks.values()).most_common(1)[0]
    by_kind: dict[str, set[int]] = {}
    for name, rank in ranks.items():
        by_kind.setdefault(_kind(name), set()).add(rank)
    pattern: dict[str, int] = {}
    for name, rank in ranks.items():
        if rank != usual:
            pattern[_kind(name) if len(by_kind[_kind(name)]) == 1 else name] = rank
    shown = dict(list(pattern.items())[:MAX_SHOWN])
    if not pattern:
        return f'"r": {usual} and no rank_pattern'
    more = " (and so on: a module's rank is the first number in the shape of its lora_A)"
    return f'"r": {usual} and "rank_pattern": {json.dumps(shown)}{more if len(pattern) > MAX_SHOWN else ""}'


def kinds(names: Iterable[str]) -> list[str]:
    """The last parts of the modules' names, such as q_proj."""
    return sorted({_kind(name) for name in names})[:MAX_SHOWN]


def _kind(name: str) -> str:
    return name.rpartition(".")[2]
