"""Which kernels a batch launches: an engine of a profile and one that is deployed do the same."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from controlplane.planning.engine_config import engine_config
from controlplane.settings import Settings
from controlplane.state.records import Model, Phase
from placement.types import Placement, Plan, RankPlacement
from profiler.checkpoint import read_model
from profiler.profiling_plan import EngineRun, Reach, profiling_plan
from profiler.types import Estimate
from profiler.variants.synthetic import synthetic_spec
from profiler.variants.types import VariantKind
from testkit import random_variants
from testkit.random_variants import RandomDelta
from workers.group.vllm_arguments import variant_config
from workers.measuring.engine import variant_options
from workers.measuring.engine_run_job import Job
from workers.patches.vllm.graph_choice import Graph
from workers.variant_config import VariantConfig
from workers.variants import hooking, operators
from workers.variants.alone import COST
from workers.variants.alone import ROWS as ROWS_PER_STEP
from workers.variants.hooking import find_layers
from workers.variants.layers import NormHook, VariantEmbedding
from workers.variants.manager import VariantManager
from workers.variants.shapes import LinearShape, Slice, VocabularyShape

H200 = "nvidia-h200"
# Wide enough for a block of every synthetic BOFT.
SHAPE = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
ROWS, SLOTS = 4, 3
LAUNCHERS = ("add", "rotate", "rescale", "replace_bias", "embed", "norm", "head")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_variants.write_tiny_base(tmp_path_factory.mktemp("launches") / "base", **SHAPE)


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, EngineRun]:
    """By its kind, every engine with one kind of variants that a profile starts on a GPU."""
    spec = read_model(folder)
    reach = Reach(False, 1, 80 << 30, 64, 32, 64, max_lora_rank=4, max_variants=SLOTS)
    with_variants = [run for run in profiling_plan(spec, reach) if run.variants]
    own = [run for run in with_variants if len({*run.setting.launched} - {"lora"}) <= 1]
    assert len(with_variants) == len(own) + 1  # and one engine of all kinds
    return {run.setting.launched[-1]: run for run in own}


@pytest.fixture(scope="module", autouse=True)
def parallel_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's layers ask it which rank they are."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state as state

    store = tmp_path_factory.mktemp("ranks") / "store"
    with set_current_vllm_config(VllmConfig()):
        state.init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        state.initialize_model_parallel()
        yield
        state.destroy_model_parallel()
        state.destroy_distributed_environment()


class Block(torch.nn.Module):
    """The layers of one block that variants may change, embedding and head."""

    packed_modules_mapping: ClassVar = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "up": ["gate_proj", "up_proj"],
    }
    config = SimpleNamespace(tie_word_embeddings=False)

    def __init__(self) -> None:
        from vllm.model_executor.layers import linear
        from vllm.model_executor.layers.layernorm import RMSNorm
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(64, 64)
        self.input_layernorm = RMSNorm(64)
        self.qkv_proj = linear.QKVParallelLinear(64, 16, 4, 2, bias=False)
        self.o_proj = linear.RowParallelLinear(64, 64, bias=False)
        self.up = linear.MergedColumnParallelLinear(64, [96, 96], bias=False)
        self.down_proj = linear.RowParallelLinear(96, 64, bias=False)
        self.lm_head = ParallelLMHead(64, 64)

    @property
    def linears(self) -> tuple[Any, ...]:
        return self.qkv_proj, self.o_proj, self.up, self.down_proj

    def compute_logits(self, hidden_states: torch.Tensor) -> Any:
        return self.lm_head.quant_method.apply(self.lm_head, hidden_states)

    def run(self, hooks: Iterable[Any]) -> None:
        """Each layer's arithmetic on a few rows, as a step runs it."""
        for layer in self.linears:
            layer.quant_method.run(torch.ones(ROWS, layer.input_size), None)
        for hook in hooks:
            match hook:
                case VariantEmbedding():
                    hook.run(torch.zeros(ROWS, dtype=torch.int64))
                case NormHook():
                    hook.run(torch.ones(ROWS, 64), torch.ones(ROWS, 64))
        self.compute_logits(torch.ones(ROWS, 64))


def hooked(
    additional: dict[str, Any], base: Path, block: type[Block] = Block
) -> tuple[VariantManager, Block, list[Any]]:
    """A manager, the layers it has hooked, and those of their hooks that torch.compile finds."""
    config = SimpleNamespace(
        lora_config=SimpleNamespace(max_loras=SLOTS, max_lora_rank=8),
        additional_config=json.loads(json.dumps(additional)),  # it travels as such
        model_config=SimpleNamespace(dtype=torch.float32, model=str(base)),
        parallel_config=SimpleNamespace(world_size=1, rank=0, pipeline_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=32),
        compilation_config=SimpleNamespace(static_forward_context={}, max_cudagraph_capture_size=32),
    )
    manager = VariantManager(config, torch.device("cpu"), {})
    model = block()
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    for layer in (*model.linears, model.lm_head):
        layer.cpu_linear = torch.nn.functional.linear  # and the weight stays, as it does on a GPU
    manager.create_lora_manager(model, config)
    return manager, model, list(config.compilation_config.static_forward_context.values())


def launches(additional: dict[str, Any], base: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """By operation, the number of its kernels' launches in the step that a CUDA graph is captured of."""
    from vllm.lora.request import LoRARequest

    manager, model, hooks = hooked(additional, base)
    with monkeypatch.context() as counting:
        counted = _counting(counting)
        stand_in = LoRARequest("stand-in", 1, "/nowhere")
        manager.add_dummy_lora(stand_in, 8)
        mapping = SimpleNamespace(index_mapping=(1,) * ROWS, prompt_mapping=(1,) * ROWS)
        manager.set_active_adapters({stand_in}, mapping)
        model.run(hooks)
    return counted


def _counting(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counted: Counter[str] = Counter()
    for name in LAUNCHERS:
        run = getattr(operators, name)

        def counts(*args: Any, _run: Any = run, _name: str = name, **named: Any) -> Any:
            counted[args[0] if _name == "add" else _name] += 1
            return _run(*args, **named)

        monkeypatch.setattr(operators, name, counts)
    return counted


def deployed(folder: Path, kind: str, run: EngineRun) -> dict[str, Any]:
    """vLLM's arguments for an engine on a GPU whose base has one variant of this kind."""
    spec = read_model(folder)
    base = Model("b", 1, Phase.READY, source=str(folder), path=str(folder), spec=spec)
    (made, *_) = [one for one in run.variants if one.kind == kind]
    variant = Model("v", 2, Phase.READY, base="b", variant_spec=synthetic_spec(spec, made))
    rank = RankPlacement(0, 0, 0, "n", 0, H200, 0, 2, 1 << 30)
    plan = Plan(1, (2,), "none", 64, 64, SLOTS, 4)
    placement = Placement(plan, (rank,), Estimate(1.0, 1.0, (1,), 100.0), "it fits")
    settings = Settings(engine="vllm", concurrency=32)
    return variant_config(engine_config(base, placement, settings, [variant])).as_json()


def profiled(folder: Path, run: EngineRun) -> dict[str, Any]:
    job = Job(
        folder=folder,
        out=folder / "found.jsonl",
        setting=run.setting,
        points=run.points,
        device_kind="cuda",
        device_bytes=1 << 30,
        distinct_layers=run.distinct_layers,
        slots=run.slots,
    )
    options = variant_options(job)
    assert options["max_lora_rank"] == 8  # the least of vLLM's that holds 4
    return dict(options["additional_config"])


@pytest.mark.parametrize("kind", ["lora", "sparse_delta", "boft"])
def test_a_profile_measures_the_kernels_that_are_launched_where_it_is_deployed(
    kind: str, folder: Path, runs: dict[str, EngineRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs are captured with stand-ins, and launch for every later batch what these did."""
    run = runs[kind]
    there = launches(deployed(folder, kind, run), folder, monkeypatch)
    assert launches(profiled(folder, run), folder, monkeypatch) == there
    assert there["lora"] == 4  # in every engine, once for each linear
    assert there["sparse_delta"] == (4 if kind == "sparse_delta" else 0)
    assert there["norm"] == there["embed"] == there["head"] == (1 if kind == "sparse_delta" else 0)
    assert there["rotate"] == there["rescale"] == (4 if kind == "boft" else 0)


def test_both_have_as_many_slots_and_ranks(folder: Path, runs: dict[str, EngineRun]) -> None:
    """Grids depend on them. Where a profile has more variants than an engine has slots, each has one."""
    for kind, run in runs.items():
        (here,), (there,) = profiled(folder, run).values(), deployed(folder, kind, run).values()
        assert here["max_rank"] == there["max_rank"] == 4
        assert there["slots"] == SLOTS
        assert here["slots"] == max(SLOTS, len(run.variants))


def in_first_layer(model: Block) -> list[hooking.Found]:
    """Its linears, by the names that a checkpoint has for the parts of each."""
    found = [(module, shape) for module, shape in find_layers(model) if isinstance(shape, LinearShape)]
    block = {"q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn"}

    def named(part: Slice) -> Slice:
        name = part.name.removeprefix(".")
        return replace(part, name=f"model.layers.0.{block.get(name, 'mlp')}.{name}")

    return [(module, replace(shape, slices=tuple(map(named, shape.slices)))) for module, shape in found]


def test_a_variant_that_is_merged_in_the_bases_place_launches_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first step launches what its kind needs, a long one when it is in its slot runs as the base's, and
    the base's own find the base's weights."""
    from vllm.lora.request import LoRARequest

    monkeypatch.setattr(VariantManager, "_mergeable", lambda self, layers: True)  # as on a GPU
    monkeypatch.setattr(hooking, "find_layers", in_first_layer)
    random_variants.write(folder, tmp_path / "delta", RandomDelta("delta", 3, full=False))
    kinds = (VariantKind.SPARSE_DELTA,)
    variants = VariantConfig(SLOTS, 1 << 20, 1 << 30, 8, kinds=kinds, merged_slot=True)
    manager, model, hooks = hooked(variants.as_json(), folder)
    before = [layer.weight.data.clone() for layer in model.linears]
    asked = LoRARequest("delta", 7, str(tmp_path / "delta"))
    with monkeypatch.context() as counting:
        counted = _counting(counting)

        def run(rows: int, request: Any) -> tuple[Graph, bool, int]:
            """The graph that the step runs from, whether the weights are the base's own, and launches
            since."""
            new = SimpleNamespace(req_id="r", lora_request=request)
            step = SimpleNamespace(
                num_scheduled_tokens={"r": rows}, scheduled_new_reqs=[new], finished_req_ids={"r"}
            )
            counted.clear()
            graph = manager._steps.choose(step)
            uid = request.lora_int_id if request else 0
            mapping = SimpleNamespace(index_mapping=(uid,) * ROWS, prompt_mapping=(uid,) * ROWS)
            manager.set_active_adapters({request} - {None}, mapping)
            model.run(hooks)
            own = all(torch.equal(a.weight.data, b) for a, b in zip(model.linears, before, strict=True))
            return graph, own, counted.total()

        many = round(COST * ROWS_PER_STEP)
        assert run(1, asked) == (Graph.OF_ITS_VARIANTS, True, 4)
        assert run(many, asked) == (Graph.OF_THE_BASE, False, 0)
        assert run(many, None) == (Graph.OF_ITS_VARIANTS, True, 0)


def test_an_embedding_of_several_ranks_is_looked_up_through_the_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs vLLM 0.32 looks the rows of a rank's shard up in one kernel, and asks no `quant_method`."""
    from vllm.model_executor.layers import vocab_parallel_embedding as vocabulary

    embedding = vocabulary.VocabParallelEmbedding(64, 16)
    embedding.tp_size, embedding.use_fused_embedding = 2, True
    shape = VocabularyShape("embed_tokens", 0, 64, 64, 16, is_head=False, tied=False)
    context: Any = SimpleNamespace()
    hooking.hook(embedding, shape, context, lambda module, hook: None)
    asked = []

    def answered(layer: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        asked.append(ids.tolist())
        return torch.ones(len(ids), 16)

    monkeypatch.setattr(type(embedding.quant_method), "embedding", lambda hook, *given: answered(*given))
    monkeypatch.setattr(vocabulary, "tensor_model_parallel_all_reduce", lambda out: out)
    monkeypatch.setattr(vocabulary.ops, "vocab_parallel_embedding", None)
    embedding(torch.tensor([3, 7]))
    assert asked == [[3, 7]]


class TiedAsBefore(Block):
    """vLLM 0.26 ties Qwen2 and Qwen3 so: one module is the embedding and the head."""

    config = SimpleNamespace(tie_word_embeddings=True)

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = self.embed_tokens


def test_an_embedding_that_is_the_head_too_is_found_as_both() -> None:
    model = TiedAsBefore()
    found = [(m, s) for m, s in find_layers(model) if isinstance(s, VocabularyShape)]
    assert [(shape.name, shape.is_head, shape.tied) for _, shape in found] == [
        ("embed_tokens", False, True),
        ("lm_head", True, True),
    ]
    assert all(module is model.embed_tokens for module, _ in found)
    assert [s.is_head for _, s in find_layers(Block()) if isinstance(s, VocabularyShape)] == [False, True]


def test_a_delta_s_head_scores_where_the_embedding_is_the_head_too(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are scored with its own table, the base's with the base's; and looked up there."""
    from vllm.lora.request import LoRARequest

    random_variants.write(folder, tmp_path / "delta", RandomDelta("delta", 3, tables=1.0))
    (own,) = (t for name, t in random_variants.weights(tmp_path / "delta") if "embed_tokens" in name)

    def tables_alone(model: Any) -> list[hooking.Found]:
        return [(m, s) for m, s in find_layers(model) if isinstance(s, VocabularyShape)]

    monkeypatch.setattr(hooking, "find_layers", tables_alone)
    config = VariantConfig(SLOTS, 1 << 20, 1 << 30, 8, kinds=(VariantKind.SPARSE_DELTA,))
    manager, model, (embedding,) = hooked(config.as_json(), folder, TiedAsBefore)
    asked = LoRARequest("delta", 7, str(tmp_path / "delta"))
    rows = (7, 0, 7, 0)
    manager.set_active_adapters({asked}, SimpleNamespace(index_mapping=rows, prompt_mapping=rows))
    x = torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(1))
    expected = torch.where(torch.tensor(rows)[:, None] == 7, x @ own.float().T, x @ torch.ones(64, 64))
    torch.testing.assert_close(model.compute_logits(x), expected)
    ids = torch.tensor([5, 5, 9, 9])
    looked_up = torch.where(torch.tensor(rows)[:, None] == 7, own.float()[ids], torch.ones(ROWS, 64))
    torch.testing.assert_close(embedding.run(ids), looked_up)
