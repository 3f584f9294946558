"""The cost of sparse deltas in an engine's steps: one alone, many decoding, a prefill among them.

    python -m benchmarks.delta_steps --out RESULT.json [--variants 28] [--bits 4,2] [--switches 1,0]
                                     [--merged 0,1] [--tables 8,16]

A 7B shape with dummy weights in bfloat16 and deltas of random codes, CUDA graphs on; each engine in a process
of its own. The base's rows are those of a merged model: its steps are the same. A switch is
OSTINATO_SPARSE_TENSOR_CORES: 0 has the Triton kernel in place of sparse tensor cores and merged weights.
With `--merged` 1 the engine has a slot for a variant that runs alone (`workers.variants.merged_slot`).
`--tables`: bits of embedding and head, 8 of what they differ by from the base's, or 16 of a whole.

- `agreement`: log-probabilities of a prompt. How much those of a variant that has long run alone differ from
those in a batch with the base, how much these differ from the base's, and whether the base's are the same
afterwards.
- `alone`: one request; TTFT for each length of prompt, and TPOT.
- `after_another`: TTFT of one request, when the last one was of another variant or of the base.
- `together`: one stream of each variant; TPOT.
- `mixed`: the same, but for one that arrives with a prompt of MIXED tokens while the others decode: the gap
  that the others see.

Milliseconds, medians; a stream's gaps are those between its tokens' arrivals.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import gpu_engine, rehearsing
from benchmarks.rehearsal_engine import SHAPE as REHEARSED
from benchmarks.rehearsal_engine import base_of
from benchmarks.serving import deltas
from benchmarks.streams import Player, Stream, median
from workers.group.cuda_graphs import graph_sizes, sizes_for
from workers.variant_config import VariantConfig

GIB = 1 << 30
SWITCH = "OSTINATO_SPARSE_TENSOR_CORES"
DISTINCT = 4  # deltas on disk; variants take them in turn
STEP_TOKENS, KV_GIB = 4096, 7
SHORT, MIXED = 64, 930  # tokens of a prompt
SCORED = (64, 1100)  # the longer one meets merged weights in any step
ALONE = 8  # times that a variant is asked: it has run alone for long enough to be merged
TIMEOUT_S = 400
WHOLE = 16  # bits of an embedding and a head


@dataclass(frozen=True)
class Lengths:
    """`alone`: of its prompts; `tokens`: of a stream that decodes; `rounds` of each measurement."""

    alone: tuple[int, ...] = (128, MIXED, 2048, 4000)
    short: int = SHORT
    mixed: int = MIXED
    tokens: int = 160
    rounds: int = 5


def measured(player: Player, variants: Sequence[Any], lengths: Lengths) -> dict[str, Any]:
    """`variants`: what to ask with, or None for the base, as many times."""
    player.play([Stream(lengths.short, 4, variant) for variant in variants])  # all are in their slots
    return {
        "alone": _alone(player, variants[0], lengths),
        "after_another": _after_another(player, variants, lengths),
        "together": {"rows": len(variants), "tpot_ms": _together(player, variants, lengths)},
        "mixed": {"rows": len(variants) - 1, "prompt": lengths.mixed, **_mixed(player, variants, lengths)},
    }


def _alone(player: Player, variant: Any, lengths: Lengths) -> dict[str, Any]:
    ttft_ms: dict[str, float] = {}
    for prompt in lengths.alone:
        streams = [Stream(prompt, 2, variant) for _ in range(lengths.rounds + 1)]  # the first one warms
        for stream in streams:
            player.play([stream])
        ttft_ms[str(prompt)] = median(stream.ttft_ms for stream in streams[1:])
    streams = [Stream(lengths.short, lengths.tokens, variant) for _ in range(lengths.rounds)]
    for stream in streams:
        player.play([stream])
    return {"ttft_ms": ttft_ms, "tpot_ms": median(gap for stream in streams for gap in stream.gaps_ms())}


def _after_another(player: Player, variants: Sequence[Any], lengths: Lengths) -> dict[str, Any]:
    """Figures by the prompt's length: after another variant, and after the base."""
    return {
        str(prompt): {
            "variant_ms": _ttft_after(player, variants[-1], Stream(prompt, 2, variants[0]), lengths),
            "base_ms": _ttft_after(player, None, Stream(prompt, 2, variants[0]), lengths),
        }
        for prompt in lengths.alone
    }


def _ttft_after(player: Player, other: Any, stream: Stream, lengths: Lengths) -> float:
    """The other one's request is long enough to be merged, too."""
    streams = [dataclasses.replace(stream, arrivals_s=[]) for _ in range(lengths.rounds)]
    for each in streams:
        player.play([Stream(lengths.mixed, 1 + lengths.tokens // 10, other)])
        player.play([each])
    return median(each.ttft_ms for each in streams)


def agreement(llm: Any, variant: Any, vocabulary: int, tokens: int) -> dict[str, Any]:
    """A prompt of `tokens` tokens."""
    prompt = [5 + 41 * i % (vocabulary - 5) for i in range(tokens)]
    (base,) = _scores(llm, prompt, [None])
    _, first = _scores(llm, prompt, [None, variant])  # in one step
    *_, last = [_scores(llm, prompt, [variant])[0] for _ in range(ALONE)]
    (again,) = _scores(llm, prompt, [None])
    return {
        "tokens": tokens,
        "mean": float(abs(last - first).mean()),
        "largest": float(abs(last - first).max()),
        "from_base": float(abs(first - base).mean()),
        "base_is_the_same": bool((again == base).all()),
    }


def _scores(llm: Any, prompt: list[int], variants: list[Any]) -> list[Any]:
    """[tokens - 1] for each."""
    import numpy as np
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    asked = [{"prompt_token_ids": prompt}] * len(variants)
    outs = llm.generate(asked, sampling, lora_request=variants, use_tqdm=False)
    pairs = [zip(out.prompt_logprobs[1:], prompt[1:], strict=True) for out in outs]
    return [np.array([scores[token].logprob for scores, token in of_one]) for of_one in pairs]


def _together(player: Player, variants: Sequence[Any], lengths: Lengths) -> float:
    streams = [Stream(lengths.short, lengths.tokens, variant) for variant in variants]
    player.play(streams)
    last_began_s = max(stream.arrivals_s[0] for stream in streams)
    return median(gap for stream in streams for gap in stream.gaps_ms(last_began_s)[1:])


def _mixed(player: Player, variants: Sequence[Any], lengths: Lengths) -> dict[str, float]:
    gaps, ttfts = [], []
    for _ in range(lengths.rounds + 1):
        streams = [Stream(lengths.short, lengths.tokens, variant) for variant in variants[1:]]
        late = Stream(lengths.mixed, 2, variants[0], after=lengths.tokens // 4)
        player.play([*streams, late])
        gaps.append(median(max(stream.gaps_ms(late.sent_s)) for stream in streams))
        ttfts.append(late.ttft_ms)
    return {"gap_ms": median(gaps[1:]), "ttft_ms": median(ttfts[1:])}


def one(bits: int, count: int, merged: bool, tables: int, work: Path) -> None:
    """One engine: prints JSON lines."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # as it is served
    shape, lengths = gpu_engine.LLAMA_7B, Lengths()
    base = gpu_engine.write_dummy_base(work / "base", shape)
    folders = [
        deltas.write(base, shape, work / f"{bits}bit-{tables}-{n}", bits, n, whole_tables=tables == WHOLE)
        for n in range(DISTINCT)
    ]
    size = sum(path.stat().st_size for path in folders[0].glob("*.safetensors"))
    arena = int(count * size * 1.01) + (64 << 20)
    weights = (base / "model.safetensors").stat().st_size
    gpu_engine.need_memory(arena + weights * (1 + merged) + (KV_GIB << 30), "fewer --variants")
    start_s = time.perf_counter()
    llm = gpu_engine.make_engine(
        base,
        VariantConfig(count, arena, 8 * GIB, 8, kinds=("sparse_delta",), merged_slot=merged),
        load_format="dummy",
        max_model_len=STEP_TOKENS,
        max_num_seqs=count,
        max_num_batched_tokens=STEP_TOKENS,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.95,
        kv_cache_memory_bytes=KV_GIB * GIB,
        compilation_config={"cudagraph_capture_sizes": _graphs(count, lengths)},
    )
    print(json.dumps({"started_s": round(time.perf_counter() - start_s, 1)}), flush=True)
    player, requests = Player(llm, shape["vocab_size"]), _requests(folders, count)
    agreed = [agreement(llm, requests[0], shape["vocab_size"], tokens) for tokens in SCORED]
    print(json.dumps({"agreement": agreed}), flush=True)
    for name, asked in (("delta", requests), ("base", [None] * count)):
        print(json.dumps({"of": name, **measured(player, asked, lengths)}), flush=True)


def _graphs(count: int, lengths: Lengths) -> list[int]:
    """The graphs that are run here, of those that are captured for serving."""
    steps = (1, count, lengths.short, *lengths.alone, count - 1 + lengths.mixed)
    return sizes_for(steps, graph_sizes(count, STEP_TOKENS))


def _requests(folders: Sequence[Path], count: int) -> list[Any]:
    from vllm.lora.request import LoRARequest

    return [LoRARequest(f"delta-{n}", n, str(folders[n % len(folders)])) for n in range(1, count + 1)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", type=Path, default=Path("/tmp/delta-steps"))
    parser.add_argument("--variants", type=int, default=28)
    parser.add_argument("--bits", default="4,2")
    parser.add_argument("--switches", default="1,0")
    parser.add_argument("--merged", default="0")
    parser.add_argument("--tables", default="8")
    parser.add_argument("--one", type=int)
    given = parser.parse_args(argv)
    if given.one:
        one(given.one, given.variants, given.merged == "1", int(given.tables), given.work)
        return
    import torch

    record: dict[str, Any] = {"command": rehearsing.command("benchmarks.delta_steps", argv)}
    record |= {"device": torch.cuda.get_device_name(0), "rows": []}
    asked = (given.bits, given.switches, given.merged, given.tables)
    for bits, switch, merged, tables in itertools.product(*(each.split(",") for each in asked)):
        os.environ[SWITCH] = switch
        command: tuple[str, ...] = ("--one", bits, "--merged", merged, "--variants", str(given.variants))
        command += ("--tables", tables, "--work", str(given.work))
        for found in gpu_engine.in_own_process("benchmarks.delta_steps", *command, timeout_s=TIMEOUT_S):
            row = {"bits": int(bits), "switch": switch, "merged": merged, "tables": tables, **found}
            record["rows"].append(row)
            rehearsing.write_result(given.out, record)


def rehearse(folder: Path, llm: Any) -> None:
    """Two deltas in the engine that rehearsals share."""
    paths = [deltas.write(base_of(llm), REHEARSED, folder / f"{n}", 4, n, n == 0) for n in range(2)]
    requests = _requests(paths, 2)
    for number, request in enumerate(requests):
        request.lora_int_id = 6000 + number  # a number of its own among the rehearsals'
    lengths = Lengths(alone=(12,), short=6, mixed=40, tokens=8, rounds=1)
    player = Player(llm, REHEARSED["vocab_size"])
    rows = [{"of": "delta", **measured(player, requests, lengths)}]
    assert rows[0]["mixed"]["gap_ms"] > 0
    agreed = agreement(llm, requests[0], REHEARSED["vocab_size"], lengths.mixed)
    assert agreed["base_is_the_same"]
    assert agreed["mean"] < agreed["from_base"] / 10
    rehearsing.write_result(folder / "delta_steps.json", {"rows": rows})
    rehearsing.check(folder / "delta_steps.json", "rows")


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
