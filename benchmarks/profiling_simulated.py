"""How far the estimator is from an engine simulated event by event, with a plot; needs no GPU and no clock.

    PYTHONPATH=.:tests/unit python -m benchmarks.profiling_simulated --out RESULT.json

The estimator sees what `ostinato profile` would measure on a host of four GPUs, with 2% of noise; truth is
every plan of `benchmarks.profiling`, of Llama-2-7B's shape. Of memory the simulated engine knows nothing.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from engine_simulator import Machine, measured

from benchmarks import rehearsing
from benchmarks.profiling.shapes import spec
from benchmarks.profiling.tasks import Task, fingerprints, truth
from benchmarks.profiling_errors import errors_of, write
from profiler.measurements import Point, Timing
from profiler.physical.calibrating import calibrate

NAME, GPUS, NOISE = "llama-2-7b", 4, 0.02
MORE_POINTS = tuple(Point(batch, length) for batch in (2, 16, 64) for length in (300, 700))
COMMAND = "PYTHONPATH=.:tests/unit python -m benchmarks.profiling_simulated"


def simulated(tasks: Iterable[Task], noise: float, more: tuple[Point, ...] = ()) -> Iterator[Timing]:
    """Each load as a measuring process would report it."""
    rng, machine = random.Random(0), Machine()
    for task in tasks:
        for point in (*task.points, *more):
            slower = 1 + rng.uniform(-noise, noise)
            setting = task.setting
            tokens = task.output_tokens + setting.prefill_steps(point.batch, point.input_tokens) - 1
            yield measured(machine, setting, point, tokens, setting.batched_tokens, slower)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=GPUS)
    given = parser.parse_args(argv)
    calibration = calibrate(spec(NAME), simulated(fingerprints(NAME, given.gpus), NOISE))
    found = list(errors_of(NAME, calibration, simulated(truth(NAME, given.gpus), 0.0, MORE_POINTS)))
    write(found, f"{COMMAND} --out {given.out}", given.out, "Against a simulated engine")


def rehearse(folder: Path) -> None:
    """A host of one GPU."""
    out = folder / "simulated.json"
    main(["--out", str(out), "--gpus", "1"])
    rehearsing.check(out, "rows")
    assert out.with_suffix(".png").stat().st_size > 1000


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
