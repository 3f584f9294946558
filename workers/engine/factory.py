"""Starts the engine that a configuration names."""

from __future__ import annotations

from workers.engine.interface import Engine
from workers.group.launch import Launch
from workers.messages import EngineConfig


async def start_engine(config: EngineConfig, launch: Launch) -> Engine:
    """Start the engine that `config` names; heavy imports happen here, in the worker's process only."""
    if config.engine == "echo":
        from workers.engine.echo import EchoEngine

        return EchoEngine(config)
    from workers.engine.vllm_engine import VllmEngine

    return await VllmEngine.start(config, launch)
