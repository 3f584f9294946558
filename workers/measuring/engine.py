"""vLLM for a measuring process: made-up weights, one setting, a limited share of each device."""

from __future__ import annotations

import os
from typing import Any

from profiler.architectures.registry import describe
from profiler.checkpoint import CONFIG_DTYPES, spec_of
from profiler.files import read_json
from profiler.physical.prefill import step_tokens
from profiler.quantization import UNCOMPRESSED, engine_name
from profiler.types import Workload
from profiler.variants.synthetic import stored_bytes
from workers.bus.client import new_address
from workers.group.cuda_graphs import compilation, graph_sizes, sizes_for
from workers.group.vllm_arguments import SCHEDULER, slot_rank
from workers.imports import quick_children, uncollected
from workers.measuring import start_barrier
from workers.measuring.engine_run_job import VARIANTS_VARIABLE, Job, tokens_of
from workers.patches.vllm import layer_sharing
from workers.variant_config import ADDRESS_VARIABLE, VariantConfig
from workers.vllm_environment import cache_apart, set_environment

PROBE = "workers.measuring.probe.Probe"
CPU_RANK = "workers.group.cpu_pipeline.CpuRank"
SLACK_BYTES = 16 << 20  # of an arena, for the alignment of its parts
KV_CACHE_BYTES = 1 << 30  # of a measured model on a CPU


def start(job: Job, **more: Any) -> Any:
    """A `vllm.LLM`; `more` options add to or replace the job's. Takes 20 to 100 s."""
    _set_environment(job)
    with uncollected():
        from vllm import LLM
    with quick_children():
        return LLM(**options(job) | more)


def options(job: Job) -> dict[str, Any]:
    setting = job.setting
    chosen: dict[str, Any] = {
        "model": str(job.folder),
        "dtype": job.dtype,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_model_len": job.max_model_len,
        "max_num_batched_tokens": setting.batched_tokens,
        "max_num_seqs": max(point.batch for point in job.points),
        "tensor_parallel_size": setting.tensor_parallel,
        "pipeline_parallel_size": len(setting.layers_per_stage),
        "kv_cache_dtype": setting.kv_dtype,
        "worker_extension_cls": PROBE,
        "disable_log_stats": True,
        "enforce_eager": not job.graphs,
    }
    if setting.quantization != UNCOMPRESSED:
        chosen["quantization"] = engine_name(setting.quantization)
    if setting.world_size > 1:
        chosen["distributed_executor_backend"] = "mp"
    if job.device_kind == "cpu":
        chosen["worker_cls"] = CPU_RANK
    if job.variants:
        chosen |= variant_options(job)
    if job.device_kind != "cpu":
        chosen["gpu_memory_utilization"] = _share(job)
        if job.graphs:
            sequences, tokens = chosen["max_num_seqs"], setting.batched_tokens
            chosen["compilation_config"] = compilation(setting.tensor_parallel, sequences, tokens)
            if setting.launched:
                chosen["compilation_config"]["cudagraph_capture_sizes"] = graph_sizes_of(job)
    return chosen


def graph_sizes_of(job: Job) -> list[int]:
    """The graph sizes that the job's loads need: with variants each other graph takes 10 s to capture."""
    points, most = job.points, job.setting.batched_tokens
    sizes = graph_sizes(max(point.batch for point in points), most)
    steps = {point.batch for point in points}
    for point in points:
        load = Workload(point.batch, point.input_tokens, tokens_of(job, point))
        steps |= step_tokens(load, most)
    return sizes_for(steps, sizes)


def variant_options(job: Job) -> dict[str, Any]:
    """The options of deployed engines (`workers.group.vllm_arguments`): the same slots, and the same kinds of
    kernels in a batch.
    """
    layers = job.distinct_layers or max(job.setting.layers_per_stage)
    where = job.folder / "config.json"
    spec = spec_of(describe(read_json(where), where), CONFIG_DTYPES[job.dtype])
    room = (
        layers * sum(stored_bytes(spec, variant) * spec.dtype_bytes // 2 for variant in job.variants)
        + SLACK_BYTES
    )
    rank = max(1, *(variant.rank for variant in job.variants))
    config = VariantConfig(
        max(job.slots, len(job.variants)),
        room,
        2 * room,
        rank,
        kinds=job.setting.launched or tuple(sorted({variant.kind for variant in job.variants})),
    )
    return {
        "enable_lora": True,
        "max_loras": config.slots,
        "max_lora_rank": slot_rank(rank),
        "scheduler_cls": SCHEDULER,
        "additional_config": config.as_json(),
    }


def _share(job: Job) -> float:
    """vLLM's share of each device's whole memory, whatever other processes use.

    The platform asks the driver; torch would create a context on the device, in this process.
    """
    from vllm.platforms import current_platform

    totals = [current_platform.get_device_total_memory(i) for i in range(job.setting.world_size)]
    return min(0.95, float(job.device_bytes / max(totals)))


def _set_environment(job: Job) -> None:
    setting, on_gpus = job.setting, job.device_kind != "cpu"
    set_environment(setting.layers_per_stage, setting.tensor_parallel, KV_CACHE_BYTES, on_gpus)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(job.own_process))
    if job.distinct_layers:
        os.environ[layer_sharing.VARIABLE] = str(job.distinct_layers)
        # Code compiled for a repeated layer must not be used for a whole model.
        os.environ["VLLM_CACHE_ROOT"] = cache_apart(f"repeated-{job.distinct_layers}")
    if job.variants:
        os.environ[ADDRESS_VARIABLE] = new_address()
        os.environ[VARIANTS_VARIABLE] = "1"
    if job.start_barrier is not None:
        os.environ[start_barrier.VARIABLE] = str(job.start_barrier)
    os.environ["VLLM_PLUGINS"] = ""  # with variants, the probe registers our plug-in
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
