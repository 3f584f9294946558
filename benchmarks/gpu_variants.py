"""Variants of every kind and the base in one batch on a GPU, against merged weights in transformers.

    PYTHONPATH=.:tests python -m benchmarks.gpu_variants --out RESULT.json

A random Llama of a few layers and the variants of tests/random_variants.py, in bfloat16. For each way of
running (eager, CUDA graphs; prefix caching or not; one GPU, or two with TP or PP): how many greedy tokens
are the reference's best, and the largest difference in log-probability, of which the base's own shows
bfloat16's share.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks import gpu_engine
from workers.variants.config import VariantConfig

SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
}
TOKENS, PROMPTS = 24, 3
CASES = ("graphs cached", "eager uncached", "graphs uncached", "eager cached")  # add "tp2" or "pp2"
CASE_TIMEOUT_S = 150


def make(work: Path) -> None:
    """The base, its variants, and a merged checkpoint of each."""
    import random_variants
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from workers.deltas.merge import merge

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, max_position_embeddings=1024, tie_word_embeddings=False)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight.mul_(6)  # decided answers: greedy tokens mean something
    model.save_pretrained(work / "base")
    (work / "base" / gpu_engine.TOKENIZER).write_text("{}")
    for variant in random_variants.EVERY_KIND:
        random_variants.write(work / "base", work / variant.name, variant)
        merge(work / "base", work / variant.name, work / f"{variant.name}.merged")


def names() -> list[str]:
    import random_variants

    return [variant.name for variant in random_variants.EVERY_KIND]


def one(case: str, work: Path) -> None:
    """One engine; prints a JSON line for the base and each variant."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    config = VariantConfig(len(names()) + 1, 1 << 30, 2 << 30, 16)
    llm = gpu_engine.make_engine(
        work / "base",
        config,
        enforce_eager="eager" in case,
        enable_prefix_caching="uncached" not in case,
        max_model_len=512,
        max_num_seqs=32,
        gpu_memory_utilization=0.3,
        **parallel(case),
        compilation_config=compilation(case),
    )
    requests = [None, *(LoRARequest(n, i + 1, str(work / n)) for i, n in enumerate(names()))]
    prompts = [[(37 * p + 11 * j) % 4000 + 5 for j in range(40)] for p in range(PROMPTS)]
    rows = [(prompt, request) for prompt in prompts for request in requests]
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0, logprobs=1, detokenize=False, ignore_eos=True)
    for _ in range(2):  # the second time, prefixes are cached
        answers = llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in rows],
            sampling,
            lora_request=[request for _, request in rows],
            use_tqdm=False,
        )
    for request in requests:
        mine = [a for a, (_, r) in zip(answers, rows, strict=True) if r is request]
        print(
            json.dumps({"case": case, **compare(work, request.lora_name if request else "base", mine)}),
            flush=True,
        )


def parallel(case: str) -> dict[str, int]:
    return {
        "tensor_parallel_size": 2 if "tp2" in case else 1,
        "pipeline_parallel_size": 2 if "pp2" in case else 1,
    }


def compilation(case: str) -> dict[str, Any]:
    """On H200s, vLLM 0.26 cannot capture graphs with TP unless these two passes are off."""
    passes = {"pass_config": {"fuse_allreduce_rms": False, "enable_sp": False}} if "tp2" in case else {}
    return passes if "eager" in case else {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32], **passes}


def compare(work: Path, name: str, answers: list[Any]) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    folder = work / ("base" if name == "base" else f"{name}.merged")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda().eval()
    worst, best, count = 0.0, 0, 0
    for answer in answers:
        prompt, tokens = list(answer.prompt_token_ids), list(answer.outputs[0].token_ids)
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + tokens]).cuda()).logits.float()
        expected = logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
        for i, token in enumerate(tokens):
            worst = max(worst, abs(float(expected[i, token]) - answer.outputs[0].logprobs[i][token].logprob))
            best += int(expected[i].argmax() == token)
            count += 1
    return {"variant": name, "tokens": count, "best": best, "largest_difference": round(worst, 4)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", type=Path, default=Path("/tmp/gpu-variants"))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--one")
    given = parser.parse_args()
    if given.one:
        one(given.one, given.work)
        return
    start = time.perf_counter()
    if not (given.work / "base").exists():
        make(given.work)
    print(f"variants made in {time.perf_counter() - start:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    for case in given.cases.split(","):
        rows += gpu_engine.in_own_process(
            "benchmarks.gpu_variants", "--one", case, "--work", str(given.work), timeout_s=CASE_TIMEOUT_S
        )
        given.out.write_text(
            json.dumps({"command": "python -m benchmarks.gpu_variants", "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
