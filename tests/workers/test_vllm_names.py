"""Every name of vLLM's that we rely on exists in the vLLM that is installed.

vLLM promises none of them. Where an upgrade takes one away, this says which, and who relied on it.
Read from vLLM's sources, so that it needs neither a device nor the seconds an import takes.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from controlplane.gateway import engine_errors
from testkit import package_sources
from workers.vllm_environment import environment

RUNNER_FILES = ("v1/worker/lora_model_runner_mixin.py", "v1/worker/gpu_model_runner.py", "v1/worker/gpu")
SCHEDULER = "v1/core/sched/scheduler.py"
LINEAR = "model_executor/layers/linear.py"
VOCABULARY = "model_executor/layers/vocab_parallel_embedding.py"

# File of vLLM's, class there, its methods and attributes (inherited ones are named where they are made). Each
# part that a patch replaces is in its `Target`, which tests/unit/test_patches.py checks.
RELIED_ON = [
    # workers.patches.vllm.attention_splits
    (
        "v1/attention/backends/flash_attn.py",
        "FlashAttentionMetadataBuilder",
        ("__init__", "max_cudagraph_size"),
    ),
    # workers.group.token_broadcast
    ("v1/worker/gpu/pp_utils.py", "PPHandler", ("__init__", "broadcast_group")),
    ("v1/worker/gpu/model_runner.py", "GPUModelRunner", ("pp_handler",)),
    ("distributed/parallel_state.py", "GroupCoordinator", ("group_ranks", "cpu_group")),
    # workers.engine.scheduler
    ("v1/core/sched/async_scheduler.py", "AsyncScheduler", ("__init__",)),
    (SCHEDULER, "Scheduler", ("schedule", "update_from_output", "shutdown", "finish_requests")),
    (SCHEDULER, "Scheduler", ("running", "waiting", "requests", "finished_req_ids", "policy")),
    (SCHEDULER, "Scheduler", ("_preempt_request", "prev_step_scheduled_req_ids", "_pause_state")),
    (SCHEDULER, "Scheduler", ("vllm_config", "parallel_config", "lora_config", "get_request_counts")),
    ("v1/core/sched/interface.py", "PauseState", ("UNPAUSED",)),
    ("v1/core/sched/output.py", "SchedulerOutput", ("num_scheduled_tokens", "finished_req_ids")),
    ("v1/core/sched/request_queue.py", "FCFSRequestQueue", ("add_request", "remove_requests", "__iter__")),
    ("v1/core/sched/request_queue.py", "PriorityRequestQueue", ("add_request", "remove_requests")),
    ("v1/request.py", "Request", ("request_id", "arrival_time", "lora_request", "status", "max_tokens")),
    ("v1/request.py", "Request", ("num_output_tokens", "num_in_flight_tokens", "client_index")),
    ("v1/request.py", "Request", ("get_finished_reason",)),
    ("v1/request.py", "RequestStatus", ("PREEMPTED", "FINISHED_ERROR")),
    ("v1/engine/__init__.py", "EngineCoreOutput", ("request_id", "new_token_ids", "finish_reason")),
    ("v1/engine/__init__.py", "EngineCoreOutputs", ("outputs",)),
    # workers.patches.vllm.grammar_backends
    ("v1/structured_output/__init__.py", "StructuredOutputManager", ("grammar_init", "backend")),
    # workers.group.grammar_process
    (
        "sampling_params.py",
        "StructuredOutputsParams",
        ("json", "regex", "choice", "grammar", "json_object", "structural_tag", "_backend"),
    ),
    # workers.engine.checked_grammars and workers.patches.vllm.grammar_validation
    (
        "sampling_params.py",
        "StructuredOutputsParams",
        ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"),
    ),
    ("sampling_params.py", "StructuredOutputsParams", ("_backend_was_auto", "all_constraints_none")),
    # workers.patches.vllm.instant_answers
    ("v1/engine/__init__.py", "EngineCoreOutput", ("events",)),
    ("v1/engine/__init__.py", "EngineCoreEvent", ("new_event",)),
    ("v1/engine/__init__.py", "EngineCoreEventType", ("QUEUED", "SCHEDULED")),
    ("v1/engine/__init__.py", "FinishReason", ("LENGTH",)),
    ("v1/engine/async_llm.py", "AsyncLLM", ("engine_core",)),
    ("v1/engine/core_client.py", "AsyncMPClient", ("add_request_async", "outputs_queue")),
    ("lora/request.py", "LoRARequest", ("lora_name", "lora_int_id", "lora_path")),
    # workers.engine.request_guard and workers.patches.vllm.failed_answers
    (
        "v1/engine/output_processor.py",
        "OutputProcessor",
        ("add_request", "process_outputs", "request_states"),
    ),
    ("v1/engine/output_processor.py", "OutputProcessorOutput", ("reqs_to_abort",)),
    ("v1/engine/output_processor.py", "RequestOutputCollector", ("put",)),
    ("v1/engine/async_llm.py", "AsyncLLM", ("output_processor",)),
    ("sampling_params.py", "SamplingParams", ("_bad_words_token_ids", "_all_stop_token_ids")),
    # workers.engine.own_applications and workers.patches.vllm.engine_copy
    ("v1/engine/async_llm.py", "AsyncLLM", ("renderer", "input_processor", "vllm_config", "model_config")),
    ("v1/engine/async_llm.py", "AsyncLLM", ("output_handler", "shutdown", "__del__")),
    ("v1/engine/input_processor.py", "InputProcessor", ("generation_config_fields", "renderer")),
    ("renderers/hf.py", "HfRenderer", ("__init__",)),
    ("renderers/base.py", "BaseRenderer", ("tokenizer",)),
    ("config/model.py", "ModelConfig", ("generation_config", "get_diff_sampling_param")),
    ("sampling_params.py", "SamplingParams", ("all_stop_token_ids", "structured_outputs", "ignore_eos")),
    # workers.engine.vllm_stats
    ("v1/metrics/stats.py", "SchedulerStats", ("num_running_reqs", "num_waiting_reqs", "kv_cache_usage")),
    ("v1/metrics/stats.py", "IterationStats", ("inter_token_latencies_iter", "finished_requests")),
    ("v1/metrics/stats.py", "FinishedRequestStats", ("num_prompt_tokens", "prefill_time")),
    # workers.variants.hooking and layers, workers.patches.vllm.layer_methods
    (LINEAR, "LinearBase", ("input_size", "output_size", "quant_method", "tp_rank", "tp_size")),
    (LINEAR, "RowParallelLinear", ("input_size_per_partition",)),
    (LINEAR, "MergedColumnParallelLinear", ("output_sizes",)),
    (LINEAR, "QKVParallelLinear", ("head_size", "num_heads", "total_num_heads")),
    (LINEAR, "QKVParallelLinear", ("num_kv_heads", "total_num_kv_heads", "num_kv_head_replicas")),
    (VOCABULARY, "VocabParallelEmbedding", ("shard_indices", "org_vocab_size", "embedding_dim")),
    (VOCABULARY, "VocabParallelEmbedding", ("quant_method",)),
    (VOCABULARY, "VocabParallelEmbeddingShardIndices", ("org_vocab_start_index", "org_vocab_end_index")),
    (VOCABULARY, "ParallelLMHead", ("__init__",)),
    ("model_executor/layers/layernorm.py", "RMSNorm", ("variance_epsilon", "weight")),
    ("model_executor/layers/layernorm.py", "GemmaRMSNorm", ("variance_epsilon", "weight")),
    # workers.patches.vllm.prompt_scoring
    ("forward_context.py", "ForwardContext", ("no_compile_layers",)),
    ("config/compilation.py", "CompilationConfig", ("static_forward_context",)),
    # workers.patches.vllm.graph_choice
    ("v1/worker/gpu/model_runner.py", "GPUModelRunner", ("execute_model", "cudagraph_manager")),
    ("v1/worker/gpu_model_runner.py", "GPUModelRunner", ("execute_model", "cudagraph_dispatcher")),
    ("v1/core/sched/output.py", "SchedulerOutput", ("scheduled_new_reqs",)),
    ("v1/core/sched/output.py", "NewRequestData", ("req_id", "lora_request")),
    # workers.group.cpu_pipeline
    ("v1/worker/cpu_worker.py", "CPUWorker", ("determine_available_memory",)),
    # workers.group
    ("v1/worker/gpu_worker.py", "Worker", ("init_device", "load_model", "determine_available_memory")),
    ("v1/worker/gpu_worker.py", "Worker", ("initialize_from_config", "compile_or_warm_up_model")),
    ("v1/worker/worker_base.py", "WorkerBase", ("__init__", "rank", "cache_config")),
    ("v1/worker/gpu_model_runner.py", "GPUModelRunner", ("kv_caches", "model_memory_usage")),
    ("v1/worker/gpu/model_runner.py", "GPUModelRunner", ("kv_caches", "model_memory_usage")),
    # workers.group.first_use
    ("v1/sample/sampler.py", "Sampler", ("gather_logprobs",)),
    ("v1/worker/gpu_model_runner.py", "GPUModelRunner", ("sampler", "model_config", "device")),
    # workers.patches.vllm.layer_sharing
    ("config/compilation.py", "CompilationConfig", ("static_all_moe_layers",)),
    ("distributed/parallel_state.py", "GroupCoordinator", ("rank_in_group", "world_size")),
    # workers.measuring.probe and workers.patches.vllm.graph_memory
    ("v1/worker/gpu_worker.py", "Worker", ("init_snapshot", "peak_activation_memory")),
    ("v1/worker/gpu_model_runner.py", "GPUModelRunner", ("capture_model",)),
    ("v1/worker/gpu/model_runner.py", "GPUModelRunner", ("capture_model",)),
    ("config/cache.py", "CacheConfig", ("kv_cache_memory_bytes", "gpu_memory_utilization")),
    ("config/parallel.py", "ParallelConfig", ("nnodes", "node_rank", "master_addr", "master_port")),
    ("v1/executor/multiproc_executor.py", "MultiprocExecutor", ("__init__", "workers")),
    ("v1/executor/multiproc_executor.py", "WorkerProcHandle", ("proc", "rank")),
    ("v1/engine/async_llm.py", "AsyncLLM", ("from_engine_args", "collective_rpc", "shutdown")),
]


@cache
def vllm() -> Path:
    folder = package_sources.folder_of("vllm")
    if folder is None:
        pytest.skip("vLLM is not installed")
    return folder


@cache
def tree(file: str) -> ast.Module:
    return ast.parse((vllm() / file).read_text())


def class_in(file: str, name: str) -> ast.ClassDef:
    return package_sources.class_in(tree(file), name)


def function_in(owner: ast.AST, name: str) -> ast.FunctionDef:
    return next(n for n in ast.walk(owner) if isinstance(n, ast.FunctionDef) and n.name == name)


@pytest.mark.parametrize(
    ("file", "function", "named"),
    [
        (
            "v1/worker/gpu_model_runner.py",
            "_determine_batch_execution_and_padding",
            {"has_lora", "num_active_loras"},
        ),
        ("v1/worker/gpu/dp_utils.py", "dispatch_cg_and_sync_dp", {"num_active_loras"}),
    ],
)
def test_graphs_are_asked_for_by_names_that_we_replace(file: str, function: str, named: set[str]) -> None:
    """`workers.patches.vllm.graph_choice` does. Else a merged variant runs from its variants' graph."""
    calls = [
        node
        for node in ast.walk(function_in(tree(file), function))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "dispatch"
    ]
    assert calls
    for call in calls:
        assert named <= {keyword.arg for keyword in call.keywords}


@pytest.mark.parametrize(("file", "name", "wanted"), RELIED_ON)
def test_a_class_has_what_we_use(file: str, name: str, wanted: tuple[str, ...]) -> None:
    missing = set(wanted) - package_sources.names_in(class_in(file, name))
    assert not missing, f"{name} in vllm/{file} has no {', '.join(sorted(missing))}"


@pytest.mark.slow  # our own side imports vLLM
def test_our_scheduler_knows_every_queue() -> None:
    """A request in a queue it does not know could run without its variant, which ends the engine."""
    from workers.engine.scheduler import QUEUES

    made = re.findall(r"self\.(\w+) = create_request_queue\(", (vllm() / SCHEDULER).read_text())
    assert "waiting" in made
    assert set(made) <= set(QUEUES)


def test_the_scheduler_ends_requests_as_we_expect() -> None:
    scheduler = class_in(SCHEDULER, "Scheduler")
    ending = function_in(scheduler, "finish_requests")
    assert [a.arg for a in ending.args.args] == ["self", "request_ids", "finished_status"]
    assert ending.returns is not None
    assert ast.unparse(ending.returns) == "list[Request]"
    preempting = function_in(scheduler, "_preempt_request").args
    assert [a.arg for a in preempting.args][:3] == ["self", "request", "timestamp"]
    assert len(preempting.args) - len(preempting.defaults) == 3  # what came since has a default
    arguments = function_in(scheduler, "update_from_output").args.args
    assert [a.arg for a in arguments] == ["self", "scheduler_output", "model_runner_output"]


def test_the_runner_makes_its_manager_by_the_name_we_replace() -> None:
    mixin = ast.unparse(function_in(tree(RUNNER_FILES[0]), "load_lora_model"))
    assert "self.lora_manager = LRUCacheWorkerLoRAManager(" in mixin
    assert "return self.lora_manager.create_lora_manager(model, vllm_config)" in mixin
    imports = "from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager"
    assert imports in (vllm() / RUNNER_FILES[0]).read_text()


def test_prompts_are_scored_on_stretches_of_the_steps_hidden_states() -> None:
    runner = class_in(RUNNER_FILES[1], "GPUModelRunner")
    scoring = function_in(runner, "_get_prompt_logprobs_dict")
    assert "hidden_states" in [a.arg for a in scoring.args.args]
    made = ast.unparse(scoring)
    assert "prompt_hidden_states = hidden_states[offset:offset + num_logits]" in made
    assert "self.model.compute_logits(prompt_hidden_states)" in made
    file = "v1/worker/gpu/sample/prompt_logprob.py"
    worker = class_in(file, "PromptLogprobsWorker")
    scorers = [
        f for f in worker.body if isinstance(f, ast.FunctionDef) and "logits_fn" in ast.unparse(f.args)
    ]
    known = {"compute_prompt_logprobs", "compute_prompt_token_id_logprobs"}  # 0.26 has the first one only
    assert "compute_prompt_logprobs" in {f.name for f in scorers} <= known
    assert all("hidden_states" in [a.arg for a in f.args.args] for f in scorers)
    assert "logits_fn(prompt_hidden_states[start_idx:end_idx])" in ast.unparse(tree(file))
    asked = ast.unparse(class_in("v1/worker/gpu/model_runner.py", "GPUModelRunner"))
    assert "compute_prompt_logprobs(self.model.compute_logits, hidden_states," in asked


@pytest.mark.slow  # our own side imports vLLM
def test_our_manager_has_every_method_that_runners_call() -> None:
    from workers.variants.manager import VariantManager

    called: set[str] = set()
    for name in RUNNER_FILES:
        path = vllm() / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            called.update(re.findall(r"\blora_manager\.(\w+)", file.read_text()))
    assert {"set_active_adapters", "add_adapter", "remove_all_adapters"} <= called
    missing = {name for name in called if not hasattr(VariantManager, name)}
    assert not missing, f"vLLM's runners call {missing} of their manager of adapters"


def test_linear_layers_are_found_by_their_classes() -> None:
    for name in ("LinearBase", "MergedColumnParallelLinear", "QKVParallelLinear", "RowParallelLinear"):
        class_in(LINEAR, name)
    for name in ("VocabParallelEmbedding", "ParallelLMHead"):
        class_in(VOCABULARY, name)
    bases = [ast.unparse(b) for b in class_in(LINEAR, "QKVParallelLinear").bases]
    assert bases == ["ColumnParallelLinear"]
    assert [ast.unparse(b) for b in class_in(VOCABULARY, "ParallelLMHead").bases] == [
        "VocabParallelEmbedding"
    ]


def test_a_prefix_is_cached_for_one_variant_only() -> None:
    """Blocks are keyed by the adapter's name and, for what was registered again, by the salt that the
    gateway makes of the variant's uid."""
    source = (vllm() / "v1/core/kv_cache_utils.py").read_text()
    assert "lora_request.lora_name" in source or "lora_request.lora_path" in source
    assert "request.cache_salt" in source


def test_a_rank_with_a_fixed_cache_needs_no_other_memory_free_than_we_say() -> None:
    """Our GPU rank sets both before `init_device`, which checks the share of the whole GPU."""
    asked = ast.unparse(function_in(tree("v1/worker/utils.py"), "request_memory"))
    assert "init_snapshot.total_memory * cache_config.gpu_memory_utilization" in asked
    found = ast.unparse(function_in(tree("v1/worker/gpu_worker.py"), "determine_available_memory"))
    assert "if (kv_cache_memory_bytes := self.cache_config.kv_cache_memory_bytes)" in found


@pytest.mark.parametrize(
    ("file", "owner", "flag"),
    [
        ("v1/worker/gpu/cudagraph_utils.py", "CudaGraphManager", "_graphs_captured"),
        ("v1/cudagraph_dispatcher.py", "CudagraphDispatcher", "keys_initialized"),
    ],
)
def test_no_graph_is_found_for_a_step_without_its_flag(file: str, owner: str, flag: str) -> None:
    """The observer runs before each step: in `execute_model`."""
    chosen = ast.unparse(function_in(class_in(file, owner), "dispatch"))
    assert f"self.{flag}" in chosen
    assert "CUDAGraphMode.NONE" in chosen


def test_a_model_without_a_chat_template_is_refused_in_the_words_that_we_know() -> None:
    assert engine_errors.NO_TEMPLATE in ast.unparse(tree("renderers/hf.py"))


def test_followers_are_started_as_vllm_starts_them() -> None:
    served = ast.unparse(function_in(tree("entrypoints/cli/serve.py"), "run_headless"))
    assert "create_engine_config(usage_context=usage_context, headless=True)" in served
    assert "MultiprocExecutor(vllm_config, monitor_workers=False)" in served
    members = {f.name: f for f in ast.walk(tree("engine/arg_utils.py")) if isinstance(f, ast.FunctionDef)}
    assert "headless" in [a.arg for a in members["create_engine_config"].args.args]


def test_a_worker_captures_graphs_when_it_warms_up() -> None:
    warmed = ast.unparse(function_in(tree("v1/worker/gpu_worker.py"), "compile_or_warm_up_model"))
    assert "self.model_runner.capture_model()" in warmed


def test_ranks_of_tokens_are_counted_by_a_function_that_can_be_replaced() -> None:
    gathered = ast.unparse(function_in(tree("v1/sample/sampler.py"), "gather_logprobs"))
    assert "= batched_count_greater_than(" in gathered


def test_the_partition_of_layers_is_read_from_the_environment() -> None:
    assert "VLLM_PP_LAYER_PARTITION" in (vllm() / "distributed/utils.py").read_text()
    assert "VLLM_CPU_KVCACHE_SPACE" in (vllm() / "platforms/cpu.py").read_text()


def test_workers_are_made_with_their_arguments_by_name() -> None:
    made = ast.unparse(class_in("v1/worker/worker_base.py", "WorkerWrapperBase"))
    assert "self.worker = worker_class(**kwargs)" in made
    assert "load_general_plugins()" in made


def test_schemas_are_validated_by_functions_that_we_call() -> None:
    """`workers.group.grammar_process`."""
    function_in(tree("v1/structured_output/backend_guidance.py"), "validate_guidance_grammar")
    assert "self.structured_outputs._backend = 'outlines'" in ast.unparse(tree("sampling_params.py"))


def test_a_prompt_keeps_its_requests_salt() -> None:
    """`workers.engine.checked_grammars` reads the tenant there."""
    assert "engine_input['cache_salt'] = cache_salt" in ast.unparse(tree("renderers/base.py"))


@pytest.mark.parametrize("name", sorted(n for n in environment((1, 1)) if n.startswith("VLLM_")))
def test_a_variable_is_one_that_vllm_reads(name: str) -> None:
    assert f'"{name}"' in (vllm() / "envs.py").read_text()
