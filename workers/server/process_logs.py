"""The last lines one process wrote into its cluster's log folder."""

from __future__ import annotations

from collections import deque
from pathlib import Path

LONGEST_LINE = 4096


def tail(folder: Path, pid: int, lines: int) -> str:
    """The last `lines` lines of the files named after `pid` (Ray: worker-<id>-<job>-<pid>.out and .err)."""
    last: deque[str] = deque(maxlen=max(1, lines))
    for path in sorted(folder.glob(f"*-{pid}.[oe][ur][tr]"), key=lambda p: p.stat().st_mtime):
        with path.open(errors="replace") as f:
            last.extend(line.rstrip("\n")[:LONGEST_LINE] for line in f)
    return "\n".join(last) + ("\n" if last else "")
