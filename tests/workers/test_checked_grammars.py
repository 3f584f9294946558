"""The process that compiles grammars, with a real vocabulary: what passes, is refused and is remembered."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from workers.engine.checked_grammars import Grammars, Outcome

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
# Eight objects of 500 optional properties take about 8 s of CPU time.
SLOW = {f"o{k}": {"type": "object", "properties": {f"{k}p{i}": {} for i in range(500)}} for k in range(8)}
THREES = {"type": "integer", "multipleOf": 3}
GRAMMARS: dict[str, dict[str, Any]] = {
    "schema": {"json": SCHEMA},
    "choice": {"choice": ["x", "y"]},
    "nested counts": {"regex": "(([a-z ]{1,40}){1,40}){1,40}"},
    "nonsense": {"grammar": "nonsense"},
    "slow": {"json": {"type": "object", "properties": SLOW}},
    "large": {"json": {"type": "array", "items": THREES, "minItems": 10**5, "maxItems": 10**6}},
}


async def outcomes(grammars: Grammars) -> dict[str, Outcome]:
    return {name: await grammars.outcome(grammar) for name, grammar in GRAMMARS.items()}


def test_grammars_pass_or_are_refused_and_are_known_then(smollm2_folder: Path, tmp_path: Path) -> None:
    async def asked() -> tuple[dict[str, Outcome], dict[str, Outcome]]:
        grammars = Grammars(tmp_path / "s", str(smollm2_folder), "hf", 49_152)
        try:
            first = await outcomes(grammars)
        finally:
            grammars.close()
        return first, await outcomes(grammars)  # without the process

    first, again = asyncio.run(asked())
    assert first == again
    assert first["schema"] == Outcome("", "xgrammar")
    assert dict(first["choice"].fields) == {"choice": None, "grammar": 'root ::= "x" | "y"'}
    assert "the grammar cannot be used: finding its next tokens takes" in first["nested counts"].refusal
    assert "make it smaller" in first["nested counts"].refusal
    assert first["nonsense"].refusal
    assert "takes more than 4 s of CPU time" in first["slow"].refusal
    assert "compiling it takes more than 512 MiB of memory" in first["large"].refusal
    assert "crashed" not in first["large"].refusal
