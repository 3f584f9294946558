"""The growth of an engine's processes is told by process, without what is counted apart."""

from __future__ import annotations

import subprocess
import sys

from testkit.fuzz import engine_memory
from testkit.fuzz.engine_memory import FILES, GRAMMARS, ONE_GRAMMAR, SERVER, Growth, grown

MIB = 2**20
HOLDING = f"held = bytearray(b'x' * {64 * MIB}); print('.', flush=True); input()"


def test_children_that_compile_one_grammar_and_mapped_files_count_apart() -> None:
    before = {SERVER: 10, GRAMMARS: 7, FILES: 100}
    now = {SERVER: 15, GRAMMARS: 6, "EngineCore": 3, FILES: 190, ONE_GRAMMAR: 50}
    assert grown(before, now) == Growth(
        own=7, by_process={SERVER: 5, GRAMMARS: -1, "EngineCore": 3}, files=90, grammar_bytes=50
    )


def test_the_largest_growth_of_several_looks_is_kept() -> None:
    growth = Growth()
    for own in (3, 9, 4):
        growth.add(Growth(own=own, by_process={SERVER: own}, grammar_bytes=10 - own))
    assert (growth.own, growth.by_process, growth.grammar_bytes) == (9, {SERVER: 9}, 7)


def test_the_memory_of_a_child_is_found() -> None:
    before = engine_memory.bytes_by_role()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDING], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b".\n"
        found = engine_memory.bytes_by_role()["other"] - before.get("other", 0)
        child.communicate(b"\n")
    assert 64 * MIB <= found < 96 * MIB
