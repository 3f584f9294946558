"""In the place of `workers.measuring` in a rehearsal: the same request and files, and made-up measurements.

    python -m benchmarks.profiling.stand_in JOB.json --end-with-stdin

It "measures" one figure for everything.
"""

from __future__ import annotations

import sys
from pathlib import Path

from profiler.measurements import Footprint, Log, RankMemory, Timing
from workers.measuring.engine_run_job import Job

REHEARSED_BY = "benchmarks.profiling"
EVERY_S, EVERY_BYTES = 1.0, 1 << 20


def main() -> None:
    job = Job.model_validate_json(Path(sys.argv[1]).read_text())
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
