"""The process that renders a chat template: a tenant's program, which may loop or take all memory.

It reads lines of JSON, each with a template and its variables, and answers each with a line: the text, or the
error. It has the memory that a chat needs, CPU time for one chat, no files to write and no environment.
"""

from __future__ import annotations

import json
import math
import resource
import sys
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any

from workers.patches.jinja2 import folded_constants

MAX_SOURCE = 4 << 20
MEMORY_BYTES = 512 << 20  # in addition to the process's memory at its start


def main() -> None:
    _limit()
    cpu_s = int(sys.argv[1])
    for line in sys.stdin:
        _limit_time(cpu_s)
        sys.stdout.write(json.dumps(_answer(json.loads(line))) + "\n")
        sys.stdout.flush()


def _answer(asked: dict[str, Any]) -> dict[str, str]:
    try:
        if "variables" not in asked:
            return {"text": check(asked["template"])}
        return {"text": render(asked["template"], asked["variables"])}
    except MemoryError:
        return {"error": f"the template takes more than {MEMORY_BYTES >> 20} MiB of memory"}
    except Exception as error:  # all errors of a template's own code
        return {"error": f"{error}"[:2000]}


class _TooLarge(BaseException):
    """A constant is too large. Not an Exception: after one, jinja2 would leave the constant to be computed
    later.
    """


def render(template: str, variables: dict[str, Any]) -> str:
    return str(_compiled(template).render(**variables))


def check(template: str) -> str:
    """Compile the template, as servers do to analyse it: jinja2 then computes constants such as 'x' *
    10**9.
    """
    trying = environment().overlay()
    trying.filters = {name: _small(filter_) for name, filter_ in trying.filters.items()}
    try:
        with folded_constants.limited(_small):
            source = trying.compile(template, raw=True)
    except _TooLarge:
        source = None
    if source is None or len(source) > MAX_SOURCE:
        raise ValueError(f"the template's code and constants have more than {MAX_SOURCE} characters")
    return ""


def _small(function: Any) -> Any:
    @wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        try:
            made = function(*args, **kwargs)
        except MemoryError:
            raise _TooLarge from None
        if isinstance(made, str | list | tuple) and len(made) > MAX_SOURCE:
            raise _TooLarge
        return made

    return limited


@lru_cache(4)
def _compiled(template: str) -> Any:
    return environment().from_string(template)


@lru_cache(1)
def environment() -> Any:
    """The environment in which transformers compiles chat templates; a test compares the two."""
    import jinja2.exceptions
    import jinja2.ext
    import jinja2.nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks an answer for training; here it renders its contents."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(
        x: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def _limit_time(cpu_s: int) -> None:
    """Make the kernel end this process if one chat takes longer."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime + cpu_s)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


def _limit() -> None:
    _compiled("{{ 1 }}")  # later imports would count as the template's memory
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
