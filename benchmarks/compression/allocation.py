"""The time to solve the 0/1 program of DeltaMix (equation 8) exactly, by our solver and by HiGHS.

    python -m benchmarks.compression.allocation --out benchmarks/results/compression_allocation.json

One program per shape, number of candidate widths and ratio. Errors are those of singular values that fall by
a power law, with what a width leaves of a row's energy drawn around typical values. The paper's solver takes
22.5 s for the 3584 x 18944 matrix, and 29 minutes for all 196 matrices of the model (table 15, section 3.2).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import rehearsing
from workers.compression.allocation import allocate, allocate_by_highs
from workers.compression.program import BitProgram, Choice, budget_bits, rank_bits

SHAPES = {"7b-down": (3584, 18944), "7b-attention": (3584, 3584), "tiny": (48, 96)}
CANDIDATES = {6: (0, 2, 3, 4, 8, 16), 8: (0, 2, 3, 4, 5, 6, 8, 16)}
LEFT = {0: 1.0, 2: 0.12, 3: 0.03, 4: 0.008, 5: 2e-3, 6: 5e-4, 8: 3e-5, 16: 1e-7}
MAX_WIDTHS = 4
ROUNDS = 3


def instance(shape: tuple[int, int], widths: Sequence[int], ratio: float, seed: int) -> BitProgram:
    """A matrix [out, in] with all its ranks as candidates, as in the paper."""
    random = np.random.default_rng(seed)
    energy = (1 + np.arange(min(shape))) ** -1.2
    noise = random.lognormal(0, 0.1, (len(energy), len(widths)))
    errors = energy[:, None] * np.array([LEFT[bits] for bits in widths]) * noise
    costs = tuple(rank_bits(shape, bits) for bits in widths)
    return BitProgram(errors, costs, budget_bits(shape, ratio), MAX_WIDTHS)


def timed(solver: Callable[[BitProgram], Choice], program: BitProgram) -> dict[str, Any]:
    """The least of a few times, and the error; `seconds` None where the solver gave up."""
    times, error = [], None
    for _ in range(ROUNDS):
        start = time.perf_counter()
        try:
            choice = solver(program)
        except RuntimeError as gave_up:
            return {"seconds": None, "error": None, "why": str(gave_up)}
        times.append(time.perf_counter() - start)
        assert program.allows(choice), "a solver broke a constraint"
        error = program.error(choice)
    return {"seconds": round(min(times), 4), "error": error}


def measured(name: str, number: int, ratio: float, limit_s: float) -> dict[str, Any]:
    program = instance(SHAPES[name], CANDIDATES[number], ratio, seed=0)
    return {
        "shape": list(SHAPES[name]),
        "widths": list(CANDIDATES[number]),
        "max_widths": MAX_WIDTHS,
        "ratio": ratio,
        "ours": timed(allocate, program),
        "highs": timed(lambda given: allocate_by_highs(given, limit_s), program),
    }


def main(argv: Sequence[str] | None = None) -> None:
    options = rehearsing.parser(__doc__)
    options.add_argument("--shapes", default="7b-down,7b-attention")
    options.add_argument("--candidates", default="6,8", help="numbers of widths, 0 among them")
    options.add_argument("--denominators", default="16,32", help="the ratio is 1 by these")
    options.add_argument("--highs-limit-s", type=float, default=120.0)
    options.add_argument("--out", type=Path, required=True, help="JSON")
    given = options.parse_args(argv)
    rows = []
    for name in given.shapes.split(","):
        for number in map(int, given.candidates.split(",")):
            for denominator in map(int, given.denominators.split(",")):
                rows.append(measured(name, number, 1 / denominator, given.highs_limit_s))
                print(json.dumps(rows[-1]), flush=True)
    command = rehearsing.command("benchmarks.compression.allocation", argv)
    rehearsing.write_result(given.out, {"command": command, "rows": rows})


def rehearse(folder: Path) -> None:
    """A tiny matrix; the two solvers agree."""
    out = folder / "allocation.json"
    main(["--shapes", "tiny", "--candidates", "6", "--denominators", "4", "--out", str(out)])
    (row,) = rehearsing.check(out, "rows")["rows"]
    ours, highs = row["ours"]["error"], row["highs"]["error"]
    assert abs(ours - highs) <= 1e-6 * highs, f"expected one optimum, got {ours} and {highs}"


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
