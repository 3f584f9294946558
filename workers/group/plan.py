"""Each rank's plan, from the process that launches an engine to the processes of its ranks.

It is passed in an environment variable, not in vLLM's configuration. That is part of the key of vLLM's
compilation cache, and free memory differs from start to start.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from workers.messages import EngineConfig, RankConfig

VARIABLE = "OSTINATO_GROUP"
# A crashed engine's processes keep their memory until they end, which may be after the next engine starts.
WAIT_S = 20.0


@dataclass(frozen=True)
class GroupPlan:
    """Every rank's part.

    `journals` is a folder on this node; a rank waits `wait_s` for its memory. Variants are read from below
    `roots`; none: from anywhere.
    """

    name: str
    ranks: tuple[RankConfig, ...]
    journals: Path
    wait_s: float
    roots: tuple[str, ...] = ()

    def as_environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps({**asdict(self), "journals": str(self.journals)})}


def from_environment(environment: Mapping[str, str] = os.environ) -> GroupPlan | None:
    """The plan; None if vLLM was not started by us."""
    text = environment.get(VARIABLE)
    if not text:
        return None
    document = json.loads(text)
    ranks = tuple(RankConfig(**rank) for rank in document["ranks"])
    journals, roots = Path(document["journals"]), tuple(document["roots"])
    return GroupPlan(document["name"], ranks, journals, document["wait_s"], roots)


def plan_of(config: EngineConfig, journals: Path) -> GroupPlan:
    return GroupPlan(config.name, config.ranks, journals, WAIT_S, config.roots)
