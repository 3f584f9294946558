"""Traces in the form of the real ones, a few requests long: for rehearsals."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.reproduction import deltazip, traffic


def write(folder: Path) -> Path:
    """The folder that they are in."""
    made = folder / "traces"
    made.mkdir()
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [
        f"2023-11-16 18:15:{second:02d}.0000000,{100 + second},{2 + second % 4}" for second in range(40)
    ]
    for name in traffic.TRACES.values():
        (made / name).write_text("\n".join(lines) + "\n")
    asked = [
        {"timestamp": n / 2, "model": f"delta-{n % 3 + 1}", "prompt": "Who are you?", "max_tokens": 5 + n}
        for n in range(8)
    ]
    for name in deltazip.TRACES.values():
        (made / name).write_text("".join(json.dumps(one) + "\n" for one in asked))
    return made
