"""The settings of a run, in one place: shapes, memory, and its division on either side."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import gpu_engine, rehearsing

GIB = 1 << 30
GRACE_S = 20  # after an engine's deadline: half of it to end by itself, then its processes are ended
SWAP_KEY = "whole_models"
# "tiny" is for dry runs on a CPU: the same code, no meaning in its times.
SHAPES = {
    "7b": gpu_engine.LLAMA_7B,
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 2048,
    },
}
CASES = "azure@1.0,zipf@4,uniform@4,zipf@1,uniform@1"  # as time allows, so what tells most comes first


@dataclass(frozen=True)
class Settings:
    """The values given on the command line; `parser` describes each."""

    shape_name: str
    work: Path
    traces: Path
    variants: int
    bits: int
    payloads: int
    slots: int
    limits: tuple[int, ...]
    resident: int
    host_copies: int
    quantum: int
    kv_gib: float
    host_gib: float
    max_model_len: int
    max_num_seqs: int
    max_batched_tokens: int
    cases: tuple[str, ...]
    seconds: float
    drain_s: float
    offline_s: float
    seed: int

    @property
    def shape(self) -> dict[str, int]:
        return SHAPES[self.shape_name]

    @classmethod
    def of(cls, given: argparse.Namespace) -> Settings:
        taken = {name: getattr(given, name) for name in cls.__dataclass_fields__ if hasattr(given, name)}
        limits = tuple(int(n) for n in given.limits.split(",")) if given.limits else (given.slots,)
        return cls(**{**taken, "limits": limits, "cases": tuple(given.cases.split(","))})


@dataclass(frozen=True)
class SwapConfig:
    """The baseline's settings, in vLLM's `additional_config` in addition to a VariantConfig, whose slots hold
    models there."""

    host_copies: int
    quantum: int

    def as_json(self) -> dict[str, Any]:
        return {SWAP_KEY: asdict(self)}

    @classmethod
    def of(cls, vllm_config: Any) -> SwapConfig:
        return cls(**vllm_config.additional_config[SWAP_KEY])


def parser(description: str | None) -> argparse.ArgumentParser:
    made = rehearsing.parser(description)
    made.add_argument("--traces", type=Path, required=True, help="folder of the DeltaZip and Azure traces")
    made.add_argument("--out", type=Path, required=True, help="JSON; written anew after every case")
    made.add_argument("--append", action="store_true", help="keep what lies in --out, from a run before")
    made.add_argument("--engines", default="ours,baseline", help="of ours and baseline")
    made.add_argument(
        "--budget", type=float, default=540, help="seconds for all; cases that do not fit are left out"
    )
    made.add_argument(
        "--work", type=Path, default=Path("/tmp/serving"), help="where base and deltas are written"
    )
    made.add_argument("--shape", dest="shape_name", choices=SHAPES, default="7b")
    made.add_argument("--variants", type=int, default=32)
    made.add_argument("--bits", type=int, choices=(4, 2), default=4, help="of the deltas")
    made.add_argument("--payloads", type=int, default=2, help="distinct deltas on disk; variants take turns")
    made.add_argument("--slots", type=int, default=28, help="deltas on the GPU at once")
    made.add_argument("--limits", default="", help="how many may run at once, e.g. 28,8; default: --slots")
    made.add_argument("--resident", type=int, default=7, help="the baseline's whole models on the GPU")
    made.add_argument("--host-copies", type=int, default=2, help="distinct host copies of whole models")
    made.add_argument(
        "--quantum", type=int, default=8, help="the baseline's steps before another model's turn"
    )
    made.add_argument("--kv-gib", type=float, default=24, help="KV cache, on both sides")
    made.add_argument("--host-gib", type=float, default=100, help="page-locked memory for deltas")
    made.add_argument("--max-model-len", type=int, default=2048)
    made.add_argument("--max-num-seqs", type=int, default=64)
    made.add_argument("--max-batched-tokens", type=int, default=2048)
    made.add_argument("--cases", default=CASES)
    made.add_argument(
        "--seconds", type=float, default=15, help="arrivals of a synthetic case; a trace is whole"
    )
    made.add_argument(
        "--drain-s", type=float, default=10, help="after the last arrival; then a case is given up"
    )
    made.add_argument("--offline-s", type=float, default=150, help="after which an offline case is given up")
    made.add_argument("--seed", type=int, default=1)
    return made


def arguments(argv: Sequence[str], engine: str, deadline_s: float) -> list[str]:
    """The settings of the process that runs one engine."""
    return [*argv, "--one", engine, "--deadline", str(deadline_s)]
