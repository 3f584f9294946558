"""Renders chat templates in separate processes, within limits.

A template is a program of the user who registered the model. In the engine's server it could delay every
client of the base, or take the server's memory. In an engine's server, transformers compiles each template to
a `Remote`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from workers.engine import template_child
from workers.patches.transformers import chat_templates

CHILD = "workers.engine.template_child"
CPU_S = 5  # of one chat; templates take milliseconds
WALL_LIMIT_S = 60.0  # of one chat, in case the kernel does not end it
PROCESSES = 8  # idle processes that wait for their template's next chat
MAX_ANSWER_BYTES = 64 << 20
READ_BYTES = 1 << 16


class TemplateFailed(ValueError):
    """A template raised an error, or took too long."""


class Templates:
    """Renders templates, each chat with `cpu_s` of CPU time. Thread-safe."""

    def __init__(self, cpu_s: int = CPU_S) -> None:
        self._cpu_s = cpu_s
        self._idle: OrderedDict[str, _Process] = OrderedDict()
        self._lock = threading.Lock()
        self._uninstall: Callable[[], None] | None = None

    def install(self) -> None:
        """Make transformers render every chat of this process here, until `close`."""
        self._uninstall = chat_templates.install(partial(Remote, self))

    def check(self, template: str) -> None:
        """Check that servers may analyse the template, as vLLM does. Raises TemplateFailed."""
        self._ask({"template": template})

    def render(self, template: str, variables: dict[str, Any]) -> str:
        """Render a template. Raises TemplateFailed."""
        return self._ask({"template": template, "variables": variables})

    def _ask(self, asked: dict[str, Any]) -> str:
        template = asked["template"]
        with self._lock:
            process = self._idle.pop(template, None)
        if process and process.ended:
            process.kill()
            process = None
        process = process or _Process(self._cpu_s)
        try:
            answer = process.ask(asked, WALL_LIMIT_S)
        except OSError as e:
            process.kill()
            raise TemplateFailed(f"the chat template was stopped: {e}") from e
        with self._lock:
            dropped = [self._idle.pop(template, None)]
            self._idle[template] = process
            if len(self._idle) > PROCESSES:
                dropped.append(self._idle.popitem(last=False)[1])
        for each in filter(None, dropped):
            each.kill()
        if "error" in answer:
            raise TemplateFailed(answer["error"])
        return answer["text"]

    def close(self) -> None:
        if self._uninstall:
            self._uninstall()
            self._uninstall = None
        with self._lock:
            idle, self._idle = self._idle, OrderedDict()
        for process in idle.values():
            process.kill()


class Remote:
    """Replaces a compiled template."""

    def __init__(self, templates: Templates, chat_template: str) -> None:
        self._templates, self._text = templates, chat_template

    @property
    def environment(self) -> Any:
        """The environment with which vLLM parses templates, to find out how they take a message's content."""
        return template_child.environment()

    def render(self, **variables: Any) -> str:
        return self._templates.render(self._text, variables)


class _Process:
    """A template's process. It ends with this process, which closes its input."""

    def __init__(self, cpu_s: int) -> None:
        self._kept, self._cpu_s = b"", cpu_s
        self._process = subprocess.Popen(
            [sys.executable, "-m", CHILD, str(cpu_s)],
            env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": os.environ.get("PATH", "")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def ended(self) -> bool:
        """Whether the process is gone: the node's memory ran out, or a user ended it."""
        return self._process.poll() is not None

    def ask(self, asked: dict[str, Any], limit_s: float) -> dict[str, str]:
        """The text, or the error that the template raised. Raises OSError; `kill` the process then."""
        ends_s = time.monotonic() + limit_s
        self._write(json.dumps(asked, default=str).encode() + b"\n", ends_s)
        answer: dict[str, str] = json.loads(self._line(ends_s))
        return answer

    def _write(self, data: bytes, ends_s: float) -> None:
        assert self._process.stdin is not None
        into = self._process.stdin.fileno()
        os.set_blocking(into, False)
        while data:
            self._wait(into, select.POLLOUT, ends_s)
            data = data[os.write(into, data) :]

    def _line(self, ends_s: float) -> bytes:
        assert self._process.stdout is not None
        out = self._process.stdout.fileno()
        while b"\n" not in self._kept:
            self._wait(out, select.POLLIN, ends_s)
            part = os.read(out, READ_BYTES)
            if not part:
                raise OSError(self._death())
            self._kept += part
            if len(self._kept) > MAX_ANSWER_BYTES:
                raise OSError(f"the rendered text has more than {MAX_ANSWER_BYTES} bytes")
        line, _, self._kept = self._kept.partition(b"\n")
        return line

    def _wait(self, descriptor: int, event: int, ends_s: float) -> None:
        waiting = select.poll()
        waiting.register(descriptor, event)
        if not waiting.poll(max(0.0, 1000 * (ends_s - time.monotonic()))):
            raise OSError(f"rendering took longer than {WALL_LIMIT_S:.0f} s")

    def _death(self) -> str:
        code = self._process.wait()
        if code == -signal.SIGXCPU:
            return f"rendering took more than {self._cpu_s} s of CPU time"
        return "the process that renders it gave no answer"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
