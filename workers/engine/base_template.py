"""The chat template of a base. vLLM analyses it in its server, so another process tries it first."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from profiler.chat_format import named_templates
from workers.engine.template_process import TemplateFailed, Templates

log = logging.getLogger(__name__)


def arguments(templates: Templates, folder: Path, target: Path) -> list[str]:
    """vLLM's arguments for the templates in `folder`: none if all of them can be used.

    Otherwise a substitute template, written to `target`, answers each chat with the reason; completions still
    work. Registration refuses such a model, but older registrations were not checked.
    """
    for name, text in named_templates(folder).items():
        try:
            templates.check(text)
        except TemplateFailed as error:
            log.warning("%s: the chat template '%s' cannot be used: %s", folder, name, error)
            said = (
                f"the model's chat template cannot be used: {error}; correct it and register the model again"
            )
            target.write_text(f"{{{{ raise_exception({json.dumps(said)}) }}}}", encoding="utf-8")
            return ["--chat-template", str(target)]
    return []
