"""Each rank's record of its start, so that an error can name the rank that failed, its action and the reason.

vLLM tells its caller only that the engine core did not start. A rank's journal outlives the rank.
"""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

READY = "serving"
LOG_LINES = 5
LONGEST_LINE = 300


@dataclass(frozen=True)
class Entry:
    """A rank's last action; `error` if it failed at that, `told` if it was asked to end."""

    rank: int
    pid: int
    doing: str
    error: str = ""
    told: bool = False


class Journal:
    """The journal of one rank; it also keeps vLLM's log lines of this process."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"rank-{rank}.json"
        self._rank = rank
        handler = logging.FileHandler(folder / f"rank-{rank}.log")
        handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        for name in ("vllm", "workers"):
            logging.getLogger(name).addHandler(handler)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Record an action that begins, and the exception that ends it."""
        self.write(what)
        try:
            yield
        except Exception as e:
            self.write(what, error=f"{type(e).__name__}: {e}")
            raise
        except BaseException:  # SystemExit: vLLM's handler of SIGTERM
            self.write(what, told=True)
            raise

    def write(self, what: str, error: str = "", told: bool = False) -> None:
        entry = Entry(self._rank, os.getpid(), what, error, told)
        made = self._path.with_suffix(".new")
        made.write_text(json.dumps(asdict(entry)))
        made.replace(self._path)


def read(folder: Path) -> dict[int, Entry]:
    """Entries by rank, of the ranks that wrote one."""
    entries = [Entry(**json.loads(path.read_text())) for path in sorted(folder.glob("rank-*.json"))]
    return {entry.rank: entry for entry in entries}


def last_lines(folder: Path, rank: int, lines: int = LOG_LINES) -> list[str]:
    """The last lines of a rank's log."""
    path = folder / f"rank-{rank}.log"
    if not path.exists():
        return []
    with path.open(errors="replace") as log:
        kept = deque((line.strip()[:LONGEST_LINE] for line in log if line.strip()), maxlen=lines)
    return list(kept)


def suspects(entries: Mapping[int, Entry], ranks: Sequence[int]) -> tuple[list[Entry], list[Entry]]:
    """After a failed start: the ranks that raised, and those that ended without a message.

    A rank that raised may only have lost its connection to a silent rank, or waited for it. A rank that was
    asked to end (`told`) is never the cause.
    """
    known = [entries[rank] for rank in ranks if rank in entries]
    raised = [entry for entry in known if entry.error]
    return raised, [e for e in known if not e.error and not e.told and e.doing != READY]


def verdict(folder: Path, ranks: Sequence[int], otherwise: str) -> str:
    """Which rank failed and why, in one line; `otherwise` if no rank's journal says so."""
    raised, silent = suspects(read(folder), ranks)
    said = [f"rank {e.rank} failed while {e.doing}: {' '.join(e.error.split())}" for e in raised[:1]]
    said += [_silence(folder, entry, with_log=not raised) for entry in silent]
    return "; ".join(said) or otherwise


def _silence(folder: Path, entry: Entry, with_log: bool) -> str:
    said = f"rank {entry.rank} (process {entry.pid}) ended without an error while {entry.doing}"
    if not with_log:
        return said
    return f"{said}, its last lines: {' / '.join(last_lines(folder, entry.rank)) or 'none'}"
