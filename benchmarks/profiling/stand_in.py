"""In the place of `workers.measuring` in a rehearsal: the same request and files, and made-up measurements.

    python -m benchmarks.profiling.stand_in JOB.json --end-with-stdin

It waits at its start barrier, and "measures" one figure for everything.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from profiler.measurements import Footprint, Log, RankMemory, Timing
from workers.measuring.engine_run_job import Job

REHEARSED_BY = "benchmarks.profiling"
POLL_S = 0.05
EVERY_S, EVERY_BYTES = 1.0, 1 << 20


def main() -> None:
    job = Job.model_validate_json(Path(sys.argv[1]).read_text())
    while job.start_barrier is not None and not job.start_barrier.exists():
        time.sleep(POLL_S)
    log = Log(job.out)
    memory = RankMemory(
        weights=EVERY_BYTES,
        activations=EVERY_BYTES,
        graphs=EVERY_BYTES,
        runtime=EVERY_BYTES,
        kv_cache=EVERY_BYTES,
        kv_tokens=job.max_model_len,
    )
    log.append(Footprint(job.setting, (memory,) * job.setting.world_size, EVERY_S, job.distinct_layers, True))
    for point in job.points:
        log.append(
            Timing(
                job.setting,
                point,
                job.output_tokens,
                ttft_s=EVERY_S,
                ttft_last_s=EVERY_S,
                tpot_s=EVERY_S,
                latency_s=EVERY_S,
                taken_s=EVERY_S,
            )
        )


if __name__ == "__main__":
    main()
