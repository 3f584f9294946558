"""Measures plans of whole models, or of their fingerprints, on as many GPUs as there are, several at a time.

    python -m benchmarks.profiling truth --out FILE.jsonl [--shapes llama-2-7b,...] [--gpus 4]
    python -m benchmarks.profiling fingerprints --out FILE.jsonl ...

`truth` starts the whole model (made-up weights) in every plan; `fingerprints` only what a profile of it
needs, with two layers' weights (workers/measuring/repeating.py). Each engine runs in a process of its own on
GPUs of its own, small plans first; rows are written as they come, and what FILE holds is not measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_engine import TOKENIZER
from profiler.fingerprints.folder import write_fingerprint
from profiler.measurements import Point, Setting
from profiler.plans import even_stages
from workers.measuring.job import Job

LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
QWEN2: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6}
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "rms_norm_eps": 1e-6,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "head_dim": 128,
}


def shape(
    family: dict[str, Any], layers: int, hidden: int, inner: int, heads: int, kv: int, vocab: int
) -> dict[str, Any]:
    return {
        **family,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }


SHAPES = {
    "smollm2-135m": shape(LLAMA, 30, 576, 1536, 9, 3, 49152),
    "llama-3.2-3b": shape(LLAMA, 28, 3072, 8192, 24, 8, 128256),
    "llama-2-7b": shape(LLAMA, 32, 4096, 11008, 32, 32, 32000),
    "qwen2.5-14b": shape(QWEN2, 48, 5120, 13824, 40, 8, 152064),
    "qwen3-30b-a3b": shape(QWEN3_MOE, 48, 2048, 6144, 32, 4, 151936),
}
GPU_SHAPES = ("llama-3.2-3b", "llama-2-7b", "qwen2.5-14b", "qwen3-30b-a3b")
POINTS = tuple(Point(batch, length) for batch in (1, 8, 32, 128) for length in (128, 1024))
FINER = tuple(Point(batch, length) for batch in (1, 2, 4, 8, 16, 32, 64, 128) for length in (128, 1024))
CPU_POINTS = tuple(Point(batch, length) for batch in (1, 4) for length in (32, 128))
DEVICE_BYTES = 120 << 30
DISTINCT = 2
JOB_TIMEOUT_S = 240
OUTPUT_TOKENS = 48


def uneven(layers: int, stages: int) -> list[tuple[int, ...]]:
    """Three splits that are not even, with the largest stage last, first and (of four) between."""
    if stages == 2:
        firsts = (round(layers * 0.4), round(layers * 0.25), round(layers * 0.65))
        return [(first, layers - first) for first in firsts]
    quarter, step = layers // stages, layers // 8
    last = layers - 3 * quarter
    return [
        (quarter - step, quarter, quarter, last + step),
        (quarter + step, quarter, quarter, last - step),
        (quarter, quarter + step, quarter, last - step),
    ]


def truth(layers: int, gpus: int, quantizations: tuple[str, ...]) -> list[Setting]:
    found = []
    for quantization in quantizations:
        for tp, pp in ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4)):
            if tp * pp <= gpus:
                splits = [even_stages(layers, pp), *(uneven(layers, pp) if pp > 1 else [])]
                found += [Setting(split, tp, quantization) for split in splits]
    return found


def fingerprints(layers: int, gpus: int, quantizations: tuple[str, ...]) -> list[Setting]:
    """Two depths of each degree of TP, and one pipeline."""
    cuts = [(q, tp) for q in quantizations for tp in (1, 2, 4) if tp <= gpus]
    whole = [Setting((depth,), tp, q) for q, tp in cuts for depth in (layers // 2, layers)]
    pipeline = [Setting(even_stages(layers, 2))] if gpus > 1 else []
    return [*whole, *pipeline]


@dataclass
class Running:
    process: subprocess.Popen[bytes]
    gpus: list[int]
    name: str
    began: float
    out: Path


def job_of(kind: str, folder: Path, setting: Setting, out: Path, device: str) -> Job:
    return Job(
        folder=folder,
        out=out,
        setting=setting,
        points=CPU_POINTS if device == "cpu" else FINER if kind == "fingerprints" else POINTS,
        device_kind=device,
        device_bytes=DEVICE_BYTES,
        dtype="float32" if device == "cpu" else "bfloat16",
        graphs=device != "cpu",
        output_tokens=OUTPUT_TOKENS,
        distinct_layers=DISTINCT if kind == "fingerprints" else 0,
        max_model_len=1024 + OUTPUT_TOKENS + 8,
        seconds=JOB_TIMEOUT_S - 60,
    )


def start(job: Job, gpus: list[int], name: str, work: Path) -> Running:
    request = work / f"{name}.json"
    request.write_text(job.model_dump_json())
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
        "MASTER_PORT": str(29500 + gpus[0] * 20),
    }
    with (work / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "workers.measuring", str(request)],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Running(process, gpus, name, time.monotonic(), job.out)


def finished(running: Running, out: Path, work: Path) -> bool:
    """Whether it has ended, or has just been ended for taking too long; its rows are in `out` then."""
    took = time.monotonic() - running.began
    if running.process.poll() is None and took < JOB_TIMEOUT_S:
        return False
    code = running.process.poll()
    if code is None:
        running.process.send_signal(signal.SIGABRT)
        running.process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.process.pid, signal.SIGKILL)
    rows = running.out.read_text() if running.out.exists() else ""
    with out.open("a") as file:
        file.writelines(
            json.dumps({"shape": running.name.split("@")[0], **json.loads(r)}) + "\n"
            for r in rows.splitlines()
        )
    print(f"{running.name}: {took:.0f} s, {len(rows.splitlines())} rows, exit {code}", flush=True)
    if code != 0:
        print((work / f"{running.name}.log").read_text()[-1500:], flush=True)
    return True


def done_already(out: Path) -> set[tuple[str, str]]:
    rows = map(json.loads, out.read_text().splitlines()) if out.exists() else ()
    return {(row["shape"], json.dumps(row["setting"])) for row in rows if row["kind"] == "timing"}


def missing(kind: str, names: list[str], out: Path, gpus: int) -> list[tuple[str, Setting]]:
    """By shape what `out` does not hold yet; those that need most GPUs first."""
    settings = {"truth": truth, "fingerprints": fingerprints}[kind]
    known, found = done_already(out), []
    for name in names:
        for setting in settings(SHAPES[name]["num_hidden_layers"], gpus, ("none",)):
            plain = {**vars(setting), "layers_per_stage": list(setting.layers_per_stage)}
            if (name, json.dumps(plain)) not in known:
                found.append((name, setting))
    return sorted(found, key=lambda item: -item[1].world_size)


def folder_of(name: str, layers: int, work: Path) -> Path:
    whole, folder = work / name, work / f"{name}-{layers}"
    if not folder.exists():
        whole.mkdir(parents=True, exist_ok=True)
        (whole / "config.json").write_text(json.dumps(SHAPES[name]))
        (whole / TOKENIZER).write_text("{}")
        write_fingerprint(whole, folder, layers)
    return folder


def label(name: str, setting: Setting) -> str:
    split = "-".join(map(str, setting.layers_per_stage))
    return f"{name}@tp{setting.tensor_parallel}-{split}-{setting.quantization}"


def run(kind: str, waiting: list[tuple[str, Setting]], given: argparse.Namespace) -> None:
    began, free, running = time.monotonic(), list(range(given.gpus)), list[Running]()
    while waiting or running:
        fits = next((w for w in waiting if w[1].world_size <= len(free)), None)
        if fits is not None and time.monotonic() - began < given.seconds:
            waiting.remove(fits)
            (name, setting), taken = fits, [free.pop(0) for _ in range(fits[1].world_size)]
            out = given.work / f"{label(name, setting)}.jsonl"
            job = job_of(kind, folder_of(name, setting.layers, given.work), setting, out, given.device)
            running.append(start(job, taken, label(name, setting), given.work))
        elif running:
            time.sleep(0.5)
            for one in [r for r in running if finished(r, given.out, given.work)]:
                running.remove(one)
                free = sorted([*free, *one.gpus])
        else:
            print(f"{len(waiting)} settings not begun: {given.seconds:.0f} s are over", flush=True)
            return


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("truth", "fingerprints"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/profiling"))
    parser.add_argument("--shapes", default=",".join(GPU_SHAPES))
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=520)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    run(given.kind, missing(given.kind, given.shapes.split(","), given.out, given.gpus), given)


if __name__ == "__main__":
    main()
