"""The memory of an engine's processes, by what each process does.

A process counts with its proportional share (PSS) of pages that it shares: a forked process shares nearly all
pages of its parent. Pages of mapped files count apart: all engines of a node share them, and the kernel can
drop them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

T = TypeVar("T")

GRAMMAR_PROCESS = "VLLM::grammars"  # the name of the process that compiles grammars
SERVER, GRAMMARS, TEMPLATES = "server", "grammars", "templates"
# A child of the process of grammars. It compiles one grammar within its own limits, and ends.
ONE_GRAMMAR = "one grammar"
FILES = "mapped files"
LOOK_EVERY_S = 5.0  # the kernel walks all pages for it


@dataclass
class Growth:
    """Bytes that processes took more than before, at most: `own` of all together, `by_process` by role.
    `files`: the same of mapped files. `grammar_bytes`: most memory of the children that each compile one
    grammar."""

    own: int = 0
    by_process: dict[str, int] = field(default_factory=dict)
    files: int = 0
    grammar_bytes: int = 0

    def add(self, other: Growth) -> None:
        """Keep the larger of each: `other` is another engine's."""
        self.own, self.files = max(self.own, other.own), max(self.files, other.files)
        self.grammar_bytes = max(self.grammar_bytes, other.grammar_bytes)
        for role, size in other.by_process.items():
            self.by_process[role] = max(self.by_process.get(role, size), size)


class Watch:
    """Watches the memory of this process and its children from now on."""

    def __init__(self) -> None:
        self._before = bytes_by_role()
        self.growth = Growth()

    async def watched(self, during: Coroutine[Any, Any, T]) -> T:
        watching = asyncio.create_task(self._look_again())
        try:
            return await during
        finally:
            watching.cancel()
            self.look()

    async def _look_again(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    def look(self) -> None:
        self.growth.add(grown(self._before, bytes_by_role()))


def grown(before: Mapping[str, int], now: Mapping[str, int]) -> Growth:
    """The growth between two results of `bytes_by_role`."""
    apart = {ONE_GRAMMAR, FILES}
    roles = (before.keys() | now.keys()) - apart
    by_process = {role: now.get(role, 0) - before.get(role, 0) for role in roles}
    return Growth(
        own=sum(by_process.values()),
        by_process=by_process,
        files=now.get(FILES, 0) - before.get(FILES, 0),
        grammar_bytes=now.get(ONE_GRAMMAR, 0),
    )


def bytes_by_role() -> dict[str, int]:
    """The memory of this process (an engine's server) and of its children, by role; FILES of all of them."""
    taken: Counter[str] = Counter()
    server = psutil.Process()
    for process in (server, *server.children(recursive=True)):
        with contextlib.suppress(psutil.Error, OSError):
            role = SERVER if process.pid == server.pid else role_of(process)
            shares = _shares(Path(f"/proc/{process.pid}/smaps_rollup").read_text())
            taken[role] += shares["Pss_Anon"] + shares["Pss_Shmem"]
            taken[FILES] += shares["Pss_File"]
    return dict(taken)


def role_of(process: psutil.Process) -> str:
    """What a child process of an engine's server does."""
    title = process.cmdline()
    if title[:1] == [GRAMMAR_PROCESS]:
        parent = process.parent()
        return ONE_GRAMMAR if parent is not None and parent.cmdline()[:1] == title[:1] else GRAMMARS
    if title[:1] and title[0].startswith("VLLM::"):
        return title[0].removeprefix("VLLM::").partition("_")[0]
    return TEMPLATES if "workers.engine.template_child" in title else "other"


def _shares(rollup: str) -> Counter[str]:
    """Bytes of each line of /proc/PID/smaps_rollup."""
    lines = (line.split() for line in rollup.splitlines()[1:])
    return Counter({name.rstrip(":"): int(kib) << 10 for name, kib, *_ in lines})
