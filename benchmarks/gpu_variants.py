"""Variants of every kind and the base in one batch on a GPU, against merged weights in transformers.

    python -m benchmarks.gpu_variants --out RESULT.json

A random Llama of a few layers, or the checkpoint at --base, with variants of testkit/random_variants.py, in
bfloat16. For each way of running (eager, CUDA graphs; prefix caching or not; one GPU, or two with TP or PP):
how many greedy tokens are the float32 reference's best, by how much in log-probability the others fall short
of its best, and the largest difference in log-probability. The base's own rows show bfloat16's share.
"scarce" in a case gives all variants three slots and answers of three lengths: requests wait, skip the line
and are preempted, and a last row says how often. "travelling" repeats that with a slow way from host memory
to the GPU: LoRAs run while they are copied. "alone" runs a variant's own requests alone, in an engine with a
slot for a variant that is merged in the base's place. "long" does the same with prompts of 640 tokens; with
"together" all are in one batch all the same. "unrotated" leaves BOFT out of the engine, whose graphs then let
long prompts of sparse deltas meet merged weights. The last row of a case lists for each rank the kernels that
served, and what they did.

    python -m benchmarks.gpu_variants --gpus 0,1 --at-once 6 --cases "graphs cached,..." \
        --out RESULT.json

Cases side by side, those of one GPU on each of the two in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks import gpu_engine, rehearsing
from benchmarks.rehearsal_engine import base_of
from profiler.variants.types import VariantKind
from workers.bus.client import VariantClient
from workers.group import cuda_graphs
from workers.variant_config import ADDRESS_VARIABLE, VariantConfig

SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
}
TOKENS, PROMPTS = 24, 3
PROMPT_TOKENS, LONG_TOKENS = 40, 640  # rows of which a sparse delta is merged, without BOFT in the engine
SCARCE = 3  # slots
ROUNDS, ROUNDS_TRAVELLING = 2, 3  # from the second on, prefixes are cached and variants are in host memory
SEQUENCES, STEP_TOKENS = 32, 2048
KV_BYTES = 1 << 30
# Add "tp2", "pp2", "scarce", "travelling", "alone", "long", "together" or "unrotated" to any.
CASES = ("graphs cached", "eager uncached", "graphs uncached", "eager cached")
CASE_TIMEOUT_S = 150
MAX_DIFFERENCE = 0.02  # in a rehearsal: float32's, in log-probability


TEXTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "Once upon a time, in a village by the sea, there lived an old fisherman who",
    "Water boils when it is heated because",
)


def make(work: Path, given: Path | None) -> None:
    """The base, its variants, and a merged checkpoint of each."""
    import torch
    from transformers import AutoModelForCausalLM

    base = work / "base"
    if given is None:
        write_base(work, SHAPE)
    else:
        AutoModelForCausalLM.from_pretrained(given, dtype=torch.bfloat16).save_pretrained(base)
        shutil.copy(given / gpu_engine.TOKENIZER, base)
    write_variants(work)


def write_base(work: Path, shape: dict[str, int]) -> Path:
    """A random Llama."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**shape, max_position_embeddings=1024, tie_word_embeddings=False)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight.mul_(6)  # decided answers: greedy tokens mean something
    model.save_pretrained(work / "base")
    gpu_engine.write_tokenizer(work / "base" / gpu_engine.TOKENIZER, config.vocab_size)
    return work / "base"


def prompts(base: Path, tokens: int = PROMPT_TOKENS) -> list[list[int]]:
    """A prompt of `tokens`, or texts where there is a tokenizer."""
    if (base / gpu_engine.TOKENIZER).read_text() == "{}":
        below = min(4000, json.loads((base / "config.json").read_text())["vocab_size"] - 5)
        return [[(37 * p + 11 * j) % below + 5 for j in range(tokens)] for p in range(PROMPTS)]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(base / gpu_engine.TOKENIZER))
    return [tokenizer.encode(text).ids for text in TEXTS]


def write_variants(work: Path) -> None:
    """Each by a process of its own: packing and merging a real model's take a core minutes."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        list(pool.map(write_variant, [work] * len(names()), range(len(names()))))


def write_variant(work: Path, index: int) -> None:
    import torch

    from testkit import random_variants
    from workers.deltas.merge import merge

    torch.set_num_threads(2)
    variant = random_variants.EVERY_FORM[index]
    random_variants.write(work / "base", work / variant.name, variant)
    merge(work / "base", work / variant.name, work / f"{variant.name}.merged")


def names(case: str = "") -> list[str]:
    from testkit import random_variants

    left_out = random_variants.RandomBoft if "unrotated" in case else ()
    return [variant.name for variant in random_variants.EVERY_FORM if not isinstance(variant, left_out)]


def kinds(case: str) -> tuple[str, ...]:
    return tuple(kind.value for kind in VariantKind if kind != VariantKind.BOFT or "unrotated" not in case)


def is_scarce(case: str) -> bool:
    return "scarce" in case or "travelling" in case


def is_apart(case: str) -> bool:
    return "together" not in case and ("alone" in case or "long" in case)


def one(case: str, work: Path) -> None:
    """One engine; prints a JSON line for the base and each variant."""
    slots = SCARCE if is_scarce(case) else len(names(case)) + 1
    config = VariantConfig(slots, 1 << 30, 2 << 30, 16, kinds=kinds(case), merged_slot="alone" in case)
    llm = gpu_engine.make_engine(
        work / "base",
        config,
        enforce_eager="eager" in case,
        enable_prefix_caching="uncached" not in case,
        max_model_len=1024 if "long" in case else 512,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=STEP_TOKENS,
        gpu_memory_utilization=0.05,  # that much must be free
        kv_cache_memory_bytes=KV_BYTES,
        **parallel(case),
        compilation_config=compilation(case),
    )
    for row in measured(llm, case, work, config.slots):
        print(json.dumps(row), flush=True)


def measured(llm: Any, case: str, work: Path, slots: int) -> Iterator[dict[str, Any]]:
    """A row for the base and each variant, and one for the scheduler and the ranks."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    from benchmarks import gpu_ranks

    scarce, travelling = is_scarce(case), "travelling" in case
    asked = prompts(work / "base", LONG_TOKENS if "long" in case else PROMPT_TOKENS)
    requests = [None, *(LoRARequest(n, i + 1, str(work / n)) for i, n in enumerate(names(case)))]
    rows = [(prompt, request) for prompt in asked for request in requests]
    common = {"temperature": 0, "logprobs": 1, "detokenize": False, "ignore_eos": True}
    sampling = [
        SamplingParams(max_tokens=TOKENS * (1 + 2 * (row // len(requests)) if scarce else 1), **common)
        for row in range(len(rows))
    ]
    of_each = [[row for row, (_, of) in enumerate(rows) if of is request] for request in requests]
    batches = of_each if is_apart(case) else [list(range(len(rows)))]
    answers: dict[int, list[Any]] = {row: [] for row in range(len(rows))}
    llm.collective_rpc(gpu_ranks.watch, args=(travelling,))
    for batch in batches * (ROUNDS_TRAVELLING if travelling else ROUNDS):
        found = llm.generate(
            [{"prompt_token_ids": rows[row][0]} for row in batch],
            [sampling[row] for row in batch],
            lora_request=[rows[row][1] for row in batch],
            use_tqdm=False,
        )
        for row, answer in zip(batch, found, strict=True):
            answers[row].append(answer)
    for request, mine in zip(requests, of_each, strict=True):
        name = request.lora_name if request else "base"
        last = [answer for row in mine for answer in answers[row][-1 if not travelling else 0 :]]
        yield {"case": case, **compare(work, name, last)}
    ranks = llm.collective_rpc(gpu_ranks.kernel_report)
    yield {"case": case, "variant": "all", **asyncio.run(counted(slots)), "ranks": ranks}


async def counted(slots: int) -> dict[str, int]:
    """The number of requests that skipped the line, and that gave their places back."""
    client = VariantClient(os.environ[ADDRESS_VARIABLE])
    state = await client.state()
    client.close()
    return {"slots": slots, "skips": state["skips"], "preemptions": state["preemptions"]}


def parallel(case: str) -> dict[str, int]:
    return {
        "tensor_parallel_size": 2 if "tp2" in case else 1,
        "pipeline_parallel_size": 2 if "pp2" in case else 1,
    }


def compilation(case: str) -> dict[str, Any]:
    """The settings of deployed engines: prefill steps are captured, too."""
    chosen = cuda_graphs.compilation(parallel(case)["tensor_parallel_size"], SEQUENCES, STEP_TOKENS)
    if "eager" in case:
        del chosen["cudagraph_capture_sizes"]
    return chosen


def compare(work: Path, name: str, answers: list[Any]) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    folder = work / ("base" if name == "base" else f"{name}.merged")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    worst, short, best, count = 0.0, 0.0, 0, 0
    for answer in answers:
        prompt, tokens = list(answer.prompt_token_ids), list(answer.outputs[0].token_ids)
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + tokens], device=device)).logits.float()
        expected = logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
        for i, token in enumerate(tokens):
            worst = max(worst, abs(float(expected[i, token]) - answer.outputs[0].logprobs[i][token].logprob))
            short = max(short, float(expected[i].max() - expected[i, token]))
            best += int(expected[i].argmax() == token)
            count += 1
    return {
        "variant": name,
        "tokens": count,
        "best": best,
        "largest_shortfall": round(short, 4),
        "largest_difference": round(worst, 4),
    }


def on_gpus(cases: list[str], gpus: list[str]) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Each case, with which GPUs its processes see: of several, those of one GPU take one after the other."""
    turns = cycle(gpus)
    for case in cases:
        whole = max(parallel(case).values()) > 1
        yield case, {"CUDA_VISIBLE_DEVICES": ",".join(gpus) if whole else next(turns)} if gpus else {}


def command(given: argparse.Namespace) -> str:
    base = f" --base {given.base.name}" if given.base else ""
    beside = f" --gpus {given.gpus} --at-once {given.at_once}" if given.gpus else ""
    return f'python -m benchmarks.gpu_variants{base}{beside} --cases "{given.cases}"'


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", type=Path, default=Path("/tmp/gpu-variants"))
    parser.add_argument("--base", type=Path, help="a checkpoint with a tokenizer.json")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--gpus", default="", help="such as 0,1; without, all that there are, for every case")
    parser.add_argument("--at-once", type=int, default=1, help="cases side by side")
    parser.add_argument("--case-seconds", type=float, default=CASE_TIMEOUT_S, help="at most")
    parser.add_argument("--one")
    given = parser.parse_args()
    if given.one:
        one(given.one, given.work)
        return
    start = time.perf_counter()
    if not (given.work / "base").exists():
        make(given.work, given.base)
    print(f"variants made in {time.perf_counter() - start:.0f} s", flush=True)
    gpus = given.gpus.split(",") if given.gpus else []
    caches = given.work / "caches"  # engines that start at the same time would write the same files of one
    works = [
        partial(
            gpu_engine.in_own_process,
            "benchmarks.gpu_variants",
            *("--one", case, "--work", str(given.work)),
            timeout_s=given.case_seconds,
            variables={**variables, "VLLM_CACHE_ROOT": str(caches / case.replace(" ", "-"))},
        )
        for case, variables in on_gpus(given.cases.split(","), gpus)
    ]
    rows: list[dict[str, Any]] = []
    for found in gpu_engine.side_by_side(works, given.at_once):
        rows += found
        rehearsing.write_result(given.out, {"command": command(given), "rows": rows})


def rehearse(folder: Path, llm: Any) -> None:
    """Every kind of variant in one batch of the engine, against the merged weights, in float32."""
    work, slots = base_of(llm).parent, len(names()) + 1
    for index in range(len(names())):
        write_variant(work, index)
    rows = list(measured(llm, "eager cached", work, slots))
    rehearsing.write_result(folder / "variants.json", {"rows": rows})
    *compared, scheduled = rehearsing.check(folder / "variants.json", "rows")["rows"]
    assert [row["variant"] for row in compared] == ["base", *names()]
    assert all(row["largest_difference"] < MAX_DIFFERENCE for row in compared), compared
    assert scheduled["slots"] == slots
    (rank,) = scheduled["ranks"]
    assert rank["placed"] == len(names())
    assert rank["steps"] >= ROUNDS * TOKENS


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
