"""The shared parts of the GPU benchmarks of variants: dummy bases, engines in this process, one process per
case."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from workers.bus.client import new_address
from workers.variant_config import ADDRESS_VARIABLE, VariantConfig

LLAMA_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
}
QWEN_7B = {  # Qwen2.5-7B's sizes, without its biases
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
PLUGINS = "vllm.general_plugins"
POLL_S = 0.5
LAST_LINES = 40  # of a process that failed, that are shown
T = TypeVar("T")
_started: set[subprocess.Popen[Any]] = set()  # and not ended yet
TOKENIZER = "tokenizer.json"  # a base must have one; here prompts are token ids and it is never read


def write_dummy_base(folder: Path, shape: dict[str, int]) -> Path:
    """A Llama checkpoint whose weights are a hole in its file: headers as they should be, no bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        **shape,
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder / TOKENIZER, shape["vocab_size"])
    header, at = {}, 0
    for name, dims in tensor_shapes(shape).items():
        size = 2 * dims[0] * (dims[1] if len(dims) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": dims, "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + at)
    return folder


def write_tokenizer(path: Path, words: int) -> None:
    """One that knows a word for each id."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    made = Tokenizer(WordLevel({f"w{number}": number for number in range(words)}, unk_token="w0"))
    made.pre_tokenizer = Whitespace()
    made.save(str(path))


def linear_shapes(shape: dict[str, int]) -> dict[str, tuple[int, int]]:
    """(out, in) of each adaptable module of a layer, by its name within the layer."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    kv = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    sizes = {"q_proj": hidden, "k_proj": kv, "v_proj": kv, "o_proj": hidden}
    found = {f"self_attn.{name}": (out, hidden) for name, out in sizes.items()}
    up = {f"mlp.{name}": (inner, hidden) for name in ("gate_proj", "up_proj")}
    return {**found, **up, "mlp.down_proj": (hidden, inner)}


def tensor_shapes(shape: dict[str, int]) -> dict[str, list[int]]:
    hidden, vocabulary = shape["hidden_size"], shape["vocab_size"]
    found = {"model.embed_tokens.weight": [vocabulary, hidden], "lm_head.weight": [vocabulary, hidden]}
    for layer in range(shape["num_hidden_layers"]):
        for name, dims in linear_shapes(shape).items():
            found[f"model.layers.{layer}.{name}.weight"] = list(dims)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{layer}.{norm}.weight"] = [hidden]
    return {**found, "model.norm.weight": [hidden]}


def make_engine(base: Path, variants: VariantConfig | None, **options: Any) -> Any:
    """vLLM in this process: without adapters, with vLLM's own (see `max_loras`), or with our variants."""
    from vllm import LLM

    chosen: dict[str, Any] = {
        "model": str(base),
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "gpu_memory_utilization": 0.8,
        **options,
    }
    if variants is not None:
        _need_plugin()
        os.environ[ADDRESS_VARIABLE] = new_address()
        chosen |= {
            "enable_lora": True,
            "max_loras": variants.slots,
            "max_lora_rank": max(8, variants.max_rank),
            "scheduler_cls": "workers.engine.scheduler.make_scheduler",
            "additional_config": variants.as_json(),
        }
    return LLM(**chosen)


def _need_plugin() -> None:
    """Without it vLLM would load its own adapters, our scheduler would wait for ours, and no request would be
    answered."""
    if not entry_points(group=PLUGINS, name="ostinato"):
        sys.exit(
            "vLLM would not find our plug-in: install the project, or put a folder ostinato-0.dist-info"
            ' next to vLLM, as benchmarks/README.md describes under "On a GPU host"'
        )


def in_own_process(
    module: str,
    *arguments: str,
    plugins: bool = True,
    timeout_s: float = 600.0,
    variables: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Run `python -m module arguments`; its lines that are JSON objects are its results, printed at once.

    After `timeout_s` it is made to print its stacks and ended with all its workers; what it had found by
    then is kept. They end, too, when this process is told to end. `variables` of its environment are its own.
    """
    environment = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        **os.environ,
        **(variables or {}),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "HF_HUB_OFFLINE": "1",
    }
    if not plugins:
        environment["VLLM_PLUGINS"] = "none"
    command = [sys.executable, "-X", "faulthandler", "-m", module, *arguments]
    results, others = [], deque[str](maxlen=LAST_LINES)
    with tempfile.NamedTemporaryFile("w") as printed:
        child = subprocess.Popen(
            command, env=environment, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
        )
        with _ended_with_us(child):
            for line in _lines_of(child, Path(printed.name), timeout_s):
                if line.startswith("{"):
                    # at once, in one piece among the lines of other threads
                    print(f"{line}\n", end="", flush=True)
                    results.append(json.loads(line))
                else:
                    others.append(line)
    if child.returncode != 0:
        print(f"{' '.join(command)} ended with {child.returncode}:", *others, sep="\n", flush=True)
    return results


def _lines_of(child: subprocess.Popen[Any], file: Path, timeout_s: float) -> Iterator[str]:
    """The process's output to a file, as it comes, until it ends; after `timeout_s` it is ended."""
    late_s, begun = time.monotonic() + timeout_s, ""
    with file.open(errors="replace") as reader:
        while True:
            ended = child.poll() is not None  # asked first: what it printed before is read once more
            *lines, begun = (begun + reader.read()).split("\n")
            yield from lines
            if ended:
                break
            if time.monotonic() > late_s:
                yield f"not done after {timeout_s:.0f} s"
                child.send_signal(signal.SIGABRT)
                child.wait()
                continue
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(POLL_S)
    if begun:
        yield begun


@contextlib.contextmanager
def _ended_with_us(child: subprocess.Popen[Any]) -> Iterator[None]:
    """Its session is ended, at the latest when this process is to end."""
    _started.add(child)
    try:
        # Only the main thread may hear signals; the others' are ended by `side_by_side`.
        main = threading.current_thread() is threading.main_thread()
        with _sigterm_as_exit() if main else contextlib.nullcontext():
            yield
    finally:
        _end(child)
        _started.discard(child)


@contextlib.contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """SIGTERM is an exception meanwhile."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(child: subprocess.Popen[Any]) -> None:
    """The process is ended with all of its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def side_by_side(works: Sequence[Callable[[], T]], at_once: int) -> Iterator[T]:
    """The results of the processes, as they come, N processes at once. Processes that they started end with
    this one."""
    with _sigterm_as_exit(), ThreadPoolExecutor(at_once) as pool:
        try:
            for done in as_completed([pool.submit(work) for work in works]):
                yield done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in [*_started]:
                _end(child)
            raise


def need_memory(size_bytes: int, fewer: str) -> None:
    """Ends this process, and names the remedy (`fewer`), where the first GPU has less memory. Without a
    driver the memory is unknown."""
    asked = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return
    if (total := int(told.split()[0]) << 20) < size_bytes:
        sys.exit(f"{size_bytes / 1e9:.0f} GB are needed, and this GPU has {total / 1e9:.0f}: {fewer}")
