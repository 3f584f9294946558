"""Another renderer of chat templates.

transformers compiles a template by its text and renders the result in its own process. A template is a
program of the user who registered the model; the replacement is `workers.engine.template_process`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from profiler.patches.target import Target

COMPILE = Target(
    "transformers.utils.chat_template_utils",
    "_compile_jinja_template",
    parameters=("chat_template",),
    read={"5.19": "481679925e73"},
)


def install(compile_: Callable[[str], Any]) -> Callable[[], None]:
    """Make transformers compile each template of this process with `compile_`; returns what ends this.

    `compile_(text)` makes an object with `environment` and `render(**variables)`, like jinja2's Template.
    """
    return COMPILE.replace(lambda _: compile_)
