"""What telling a pipeline's earlier stages of sampled tokens costs them: by NCCL, as vLLM does, and by memory
that the stages share (`workers.group.token_broadcast`), in one engine and by turns.

    python -m benchmarks.pipeline_broadcast --shape qwen2.5-14b --split 24-24 --quantization fp8 \
        --out RESULT.json                                          # two GPUs

Milliseconds, medians of rounds, made-up weights. `fill`: bursts of prompts, per step of the schedule from the
first to the last first token. `decode`: all requests decode. `same`: of greedily sampled tokens, those that
both ways give alike.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import rehearsing
from benchmarks.gpu_job import gpu_job
from benchmarks.profiling import shapes
from profiler.measurements import Point, Setting
from workers.measuring import engine
from workers.measuring.probe import Probe
from workers.measuring.timing import prompt_of, run

FILL, DECODE = Point(16, 1024), Point(64, 128)  # requests, and tokens of a prompt
FILL_TOKENS, DECODE_TOKENS = 2, 96
ROUNDS, ASKED, GREEDY = 7, 24, 48
WAYS = ("nccl", "shared memory")
SWITCH = "benchmarks.pipeline_broadcast.Switch"

Measured = dict[str, dict[str, float]]


class Switch(Probe):
    """A part of every rank's worker; all are called at once while no step runs."""

    _groups: dict[str, Any]

    def broadcast_by(self, way: str) -> str:
        """Returns whose broadcast is used now."""
        from vllm.distributed.parallel_state import get_pp_group

        handler = self.model_runner.pp_handler
        if not hasattr(self, "_groups"):
            vllms = get_pp_group().make_sibling_device_group(group_desc="pp_broadcast")
            self._groups = dict(zip(WAYS, (vllms, handler.broadcast_group), strict=True))
        handler.broadcast_group = self._groups[way]
        return str(type(handler.broadcast_group).__name__)


def compared(
    llm: Any, switch: Callable[[str], Any], fill: Point, decode: Point, rounds: int
) -> dict[str, Any]:
    """By turns; the first round of each warms."""
    fills: dict[str, list[float]] = {way: [] for way in WAYS}
    steps: dict[str, list[float]] = {way: [] for way in WAYS}
    by = {}
    for number in range(rounds + 1):
        for way in WAYS:
            by[way] = switch(way)
            first = sorted(set(run(llm, fill, FILL_TOKENS, number).first))
            fills[way].append((first[-1] - first[0]) / max(1, len(first) - 1))
            steps[way].append(run(llm, decode, DECODE_TOKENS, number).step_s)
    greedy = {}
    for way in WAYS:
        switch(way)
        greedy[way] = _tokens(llm)
    both = list(zip(*greedy.values(), strict=True))
    return {
        "by": by,
        "fill_ms": {way: _ms(found) for way, found in fills.items()},
        "decode_ms": {way: _ms(found) for way, found in steps.items()},
        "rounds_fill_ms": {way: [round(1e3 * s, 3) for s in found[1:]] for way, found in fills.items()},
        "same": [sum(one == other for one, other in both), len(both)],
    }


def _ms(seconds: Sequence[float]) -> float:
    return round(1e3 * statistics.median(seconds[1:]), 3)


def _tokens(llm: Any) -> list[int]:
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=GREEDY, temperature=0, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt_of(40 + number, number)} for number in range(ASKED)]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return [token for output in outputs for token in output.outputs[0].token_ids]


def measure(shape: str, split: tuple[int, ...], quantization: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as work:
        setting = Setting(split, 1, quantization)
        llm = engine.start(
            gpu_job(shape, setting, (FILL, DECODE), DECODE_TOKENS, Path(work)), worker_extension_cls=SWITCH
        )
        return compared(
            llm, lambda way: llm.collective_rpc("broadcast_by", args=(way,)), FILL, DECODE, ROUNDS
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-14b", choices=tuple(shapes.SHAPES))
    parser.add_argument("--split", default="24-24", help="layers of each stage")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(argv)
    split = tuple(int(layers) for layers in given.split.split("-"))
    found = measure(given.shape, split, given.quantization)
    row = {"shape": given.shape, "split": given.split, "quantization": given.quantization, **found}
    print(row, flush=True)
    command = rehearsing.command("benchmarks.pipeline_broadcast", argv)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    rehearsing.write_result(given.out, {"command": command, "device": device, "rows": [row]})


def rehearse(folder: Path, llm: Any) -> None:
    """One stage, which has nothing to switch."""
    ways: list[str] = []
    found = compared(llm, ways.append, Point(2, 64), Point(2, 16), 1)
    rehearsing.write_result(folder / "broadcast.json", {"rows": [found]})
    (row,) = rehearsing.check(folder / "broadcast.json", "rows")["rows"]
    same, of = row["same"]
    assert same == of == ASKED * GREEDY
    assert ways == list(WAYS) * 3


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
