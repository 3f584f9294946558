"""The process that compiles each grammar first, in a child with limits.

vLLM validates a grammar on the event loop of its server and compiles it in a thread of its core. A grammar
that takes minutes, or crashes the compiler, would delay or end both. Here vLLM's own code does the same work
in a child: CPU time, memory and the cost of masks are limited there. The process itself handles no grammar.

vLLM takes seconds to import, so the engine's core forks this process after its own import. If the process
ends, the engine's server starts it again as a program: `python -m workers.group.grammar_process SOCKET`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import math
import os
import resource
import signal
import socket
import sys
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from setproctitle import setproctitle

from workers.clean_environment import clean_environment
from workers.group.grammar_walks import slowest_mask_s
from workers.group.plan import from_environment
from workers.group.processes import PR_SET_PDEATHSIG
from workers.patches.vllm import schema_backends
from workers.patches.vllm.grammar_costs import MASK_LIMIT_S
from workers.vllm_environment import REGEX_LIMIT

log = logging.getLogger(__name__)

SOCKET = "grammars"  # in the folder of a launch
NAME, PR_SET_NAME = b"grammars", 15
CPU_S = 4  # of validating one grammar, and of compiling it
MEMORY_BYTES = 512 << 20  # in addition to the process's memory
HANGS_S = 600  # wall-clock time, longer than on any busy machine
MASK_CPU_S = MASK_LIMIT_S / 2  # the core allows more, as other threads disturb its measurement
WALK_TOKENS = 64
WALKS_CPU_S = 1.0  # after this time the walks of a grammar end
MAX_REQUEST_BYTES = 64 << 20
TOO_LARGE = f"compiling it takes more than {MEMORY_BYTES >> 20} MiB of memory"
FIELDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")  # one of them is given


_forked = False


def fork() -> None:
    """Fork the process from an engine's core, which has imported vLLM; once.

    Does nothing if vLLM was not started by us.
    """
    global _forked  # noqa: PLW0603
    plan = from_environment()
    if plan is None or _forked:
        return
    _forked = True
    core, listening = os.getpid(), _listen(plan.journals / SOCKET)
    if os.fork():
        listening.close()
        return
    try:
        _leave_the_core(core, listening)
        _serve(listening)
    finally:
        os._exit(1)


def main() -> None:
    _end_with(os.getppid())
    _serve(_listen(Path(sys.argv[1])))


def _listen(path: Path) -> socket.socket:
    """Listen on a socket; its folder keeps other users of the machine out."""
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen(64)
    return listening


def _leave_the_core(core: int, listening: socket.socket) -> None:
    """Keep only the core's memory: drop its sockets, its environment and its signal handlers."""
    _end_with(core)
    gc.freeze()  # collecting an old object could close a reused descriptor
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != listening.fileno():
            try:
                os.close(int(name))
            except OSError:
                continue  # the descriptor of the listing
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    kept = clean_environment()
    os.environ.clear()
    os.environ.update(kept)


def _end_with(parent: int) -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had already ended
        os._exit(1)


def _prctl(option: int, value: Any) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value)


def _serve(listening: socket.socket) -> None:
    """Serve one connection for each grammar: a line of JSON comes in, the answer goes back as JSON."""
    _prctl(PR_SET_NAME, NAME)
    setproctitle(f"VLLM::{NAME.decode()}")  # it is no longer an engine's core
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ[REGEX_LIMIT] = "0"
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        connection, _ = listening.accept()
        with connection:
            try:
                asked = json.loads(_line(connection))
                backends = Backends.of(asked["tokenizer"], asked["mode"], asked["vocabulary"])
            except Exception:  # the server finds the connection closed
                log.exception("the tokenizer could not be prepared for grammars")
                continue
            if not os.fork():
                _watched(connection, backends, asked["grammar"])
                os._exit(0)


def _line(connection: socket.socket) -> bytes:
    connection.settimeout(60)
    with connection.makefile("rb") as file:
        return file.readline(MAX_REQUEST_BYTES)


def _watched(connection: socket.socket, backends: Backends, grammar: dict[str, Any]) -> None:
    """Let a child answer; if a signal ended it, report the signal, and whether the child had become large."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before_bytes = _memory_bytes()[1]
    child = os.fork()
    if child:
        _, status, usage = os.wait4(child, 0)
        if status:
            grown_bytes = (usage.ru_maxrss << 10) - before_bytes
            ended = {"signal": os.waitstatus_to_exitcode(status), "large": grown_bytes > MEMORY_BYTES // 2}
            connection.sendall(json.dumps(ended).encode())
        return
    try:
        _limit()
        connection.sendall(json.dumps(_examined(backends, grammar)).encode())
    except BaseException:
        os._exit(1)
    os._exit(0)


def _limit() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.nice(10)
    signal.alarm(HANGS_S)
    Path("/proc/self/oom_score_adj").write_text("1000")
    limit = _memory_bytes()[0] + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _memory_bytes() -> tuple[int, int]:
    """(the address space, the resident part of it) of this process."""
    pages = Path("/proc/self/statm").read_text().split()
    return int(pages[0]) * resource.getpagesize(), int(pages[1]) * resource.getpagesize()


def _allow_cpu() -> None:
    """Allow CPU_S of CPU time from now on, for all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime + CPU_S)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


class Backends:
    """vLLM's backends, for one tokenizer, created as in its core."""

    def __init__(self, tokenizer: str, mode: str, vocabulary: int) -> None:
        from vllm.tokenizers import get_tokenizer

        outputs = SimpleNamespace(
            backend="auto", disable_any_whitespace=False, disable_additional_properties=False
        )
        model = SimpleNamespace(is_diffusion=False, hf_config=SimpleNamespace(model_type=""))
        self._config = SimpleNamespace(
            structured_outputs_config=outputs, model_config=model, speculative_config=None
        )
        self._tokenizer = get_tokenizer(tokenizer, tokenizer_mode=mode)
        self._vocabulary = vocabulary
        self.of_name("xgrammar")  # created here, it exists in all children

    @staticmethod
    @lru_cache(1)
    def of(tokenizer: str, mode: str, vocabulary: int) -> Backends:
        return Backends(tokenizer, mode, vocabulary)

    def validated(self, grammar: dict[str, Any]) -> Any:
        """vLLM's parameters of a grammar, after its validation: for llguidance where that is possible."""
        try:
            with schema_backends.llguidance_for_all():
                return self._chosen_by_vllm(grammar)
        except Exception:
            return self._chosen_by_vllm(grammar)

    def _chosen_by_vllm(self, grammar: dict[str, Any]) -> Any:
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams

        outputs, config = StructuredOutputsParams(**grammar), self._config
        SamplingParams(structured_outputs=outputs)._validate_structured_outputs(
            config.model_config, config.structured_outputs_config, self._tokenizer
        )
        return outputs

    @lru_cache(3)  # noqa: B019
    def of_name(self, name: str) -> Any:
        from vllm.v1.structured_output.backend_guidance import GuidanceBackend
        from vllm.v1.structured_output.backend_outlines import OutlinesBackend
        from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

        kinds = {"xgrammar": XgrammarBackend, "guidance": GuidanceBackend, "outlines": OutlinesBackend}
        return kinds[name](self._config, tokenizer=self._tokenizer, vocab_size=self._vocabulary)


def _examined(backends: Backends, grammar: dict[str, Any]) -> dict[str, Any]:
    """The grammar's fields that vLLM's validation changes, or why the grammar is refused."""
    from vllm.v1.structured_output.request import get_structured_output_key

    _allow_cpu()
    try:
        outputs = backends.validated(grammar)
        _allow_cpu()
        backend = backends.of_name(outputs._backend)
        _allow_cpu()
        compiled = backend.compile_grammar(*get_structured_output_key(outputs))
        _allow_cpu()
        mask = backend.allocate_token_bitmask(1)
        slowest_s = slowest_mask_s(compiled, mask, WALK_TOKENS, WALKS_CPU_S, MASK_CPU_S)
    except MemoryError:
        return {"refused": TOO_LARGE}
    except Exception as error:  # every error of vLLM and its compilers is about the grammar
        return {"invalid": str(error)[:2000] or repr(error)}
    if slowest_s > MASK_CPU_S:
        return {"refused": f"finding its next tokens takes {slowest_s:.2f} s of CPU time"}
    made = {name: getattr(outputs, name) for name in FIELDS}
    changed = {name: value for name, value in made.items() if value != grammar.get(name)}
    return {"backend": outputs._backend, "fields": changed}


if __name__ == "__main__":
    main()
