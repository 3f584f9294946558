"""The tiny engine of rehearsals that measure inside one: vLLM on the CPU, in this process, with our variants.

    python -m benchmarks.rehearsal_engine NAME ... --folder FOLDER

Rehearses these benchmarks, one after the other, in one such engine.
"""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path
from typing import Any

from benchmarks import gpu_engine, rehearsing

REHEARSED_BY = "benchmarks.gpu_variants"
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
}
SLOTS, MAX_RANK, MAX_MODEL_LEN, MAX_NUM_SEQS = 10, 16, 256, 32


def start(folder: Path) -> Any:
    """On a random Llama that it writes to FOLDER/base. Takes 20 to 30 s."""
    os.environ.update(
        TORCH_COMPILE_DISABLE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="WARNING",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )
    from benchmarks.gpu_variants import write_base
    from workers.variant_config import VariantConfig

    return gpu_engine.make_engine(
        write_base(folder, SHAPE),
        VariantConfig(SLOTS, 64 << 20, 1 << 30, MAX_RANK),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        enforce_eager=True,
        worker_cls="workers.group.cpu_pipeline.CpuRank",
    )


def base_of(llm: Any) -> Path:
    return Path(llm.llm_engine.vllm_config.model_config.model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--folder", type=Path, required=True)
    given = parser.parse_args()
    llm = start(given.folder / "engine")
    for name in given.names:
        package = ".__main__" if Path(__file__).with_name(name).is_dir() else ""
        module = importlib.import_module(f"benchmarks.{name}{package}")
        (given.folder / name).mkdir()
        rehearsing.carry_out(module.rehearse, given.folder / name, llm)
        print(f"{name}: rehearsed", flush=True)


if __name__ == "__main__":
    main()
