"""vLLM's CPU worker, able to be a later stage of a pipeline.

vLLM (to 0.32) allocates the tensors a stage receives in a warm-up that its CPU worker skips.
"""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker


class CpuRank(CPUWorker):  # type: ignore[misc]  # vLLM is untyped here
    def determine_available_memory(self) -> int:
        runner = self.model_runner
        if self.parallel_config.pipeline_parallel_size > 1 and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.get_model().make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=self.model_config.dtype, device=runner.device
            )
        return int(super().determine_available_memory())
