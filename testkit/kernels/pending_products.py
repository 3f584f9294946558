"""A check of machine code: writes to registers that a warpgroup's products still read.

A product (HGMMA) continues after its start. Until a wait (WARPGROUP.DEPBAR) has seen its group end, no
instruction may write to its sums, its weights or its indices. The assembler knows this for the first two, not
for the indices.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import triton

PRODUCT = re.compile(
    r"HGMMA(?:\.SP)?\.64x(\d+)x\d+\S* R(\d+), R(\d+), gdesc\[\w+\], R\d+(?:, R(\d+), 0x\d)?(, gsb0)?"
)
WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d+)")
WRITES_NOTHING = (
    "ST",
    "LDGSTS",
    "BRA",
    "BAR",
    "FENCE",
    "DEPBAR",
    "LDGDEPBAR",
    "WARPGROUP",
    "U",
    "R2UR",
    "EXIT",
)
WIDTHS = {".128": 4, ".64": 2, ".WIDE": 2}
WEIGHTS = 4  # registers of a product
Line = tuple[str, str]  # "label", its name; or "", an instruction


def lines_of(cubin: bytes, folder: Path) -> list[Line]:
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(file)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return list(_parsed(text))


def _parsed(text: str) -> Iterator[Line]:
    for line in text.splitlines():
        if label := re.match(r"(\.L\w+):", line.strip()):
            yield "label", label[1]
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z].*?)\s*;", line):
            yield "", found[1]


def loops(lines: list[Line]) -> Iterator[tuple[list[str], list[str]]]:
    """Each innermost loop with products, and what follows it until a wait for all of them."""
    at = {name: number for number, (kind, name) in enumerate(lines) if kind == "label"}
    for end, (_, what) in enumerate(lines):
        if not (branch := re.match(r"BRA `\((\.L\w+)\)", what)) or at[branch[1]] > end:
            continue
        body = [each for kind, each in lines[at[branch[1]] : end] if not kind]
        if any("HGMMA" in each for each in body):
            yield body, list(_until_all_ended(lines[end + 1 :]))


def _until_all_ended(lines: list[Line]) -> Iterator[str]:
    for kind, what in lines:
        if not kind:
            yield what
        if (wait := WAIT.match(what)) and int(wait[1], 16) == 0:
            return


def under_way(body: list[str]) -> int:
    """Groups of products that go on while the next are prepared, at the least."""
    return min(int(wait[1], 16) for each in body if (wait := WAIT.match(each)))


def written_too_soon(body: list[str], after: list[str]) -> list[str]:
    """Instructions that write to what a product under way reads or adds to, in a loop run three times."""
    groups: list[set[int]] = []
    begun: set[int] = set()
    found = []
    for what in [*body * 3, *after]:
        if product := PRODUCT.match(what):
            width, sums, weights = (int(number) for number in product.groups()[:3])
            begun |= {*range(weights, weights + WEIGHTS), *range(sums, sums + width // 2)}
            begun |= {int(indices) for indices in product.groups()[3:4] if indices}  # of a sparse one
            if product[5]:
                groups, begun = [*groups, begun], set()
        elif wait := WAIT.match(what):
            left = int(wait[1], 16)
            groups = groups[-left:] if left else []
        elif _written(what) & begun.union(*groups):
            found.append(what)
    return found


def _written(what: str) -> set[int]:
    name = what.split(maxsplit=1)[0]
    target = re.match(r"\S+ (?:!?U?P\w+, )*R(\d+)", what)
    if name.startswith(WRITES_NOTHING) or target is None:
        return set()
    width = next((registers for sign, registers in WIDTHS.items() if sign in name), 1)
    return set(range(int(target[1]), int(target[1]) + width))
