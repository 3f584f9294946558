"""Chat templates, in processes of their own: texts as transformers', and no harm done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2.meta
import pytest
from transformers.utils import chat_template_utils

from workers.engine import base_template, template_process
from workers.engine.template_process import TemplateFailed, Templates

CHATML = (
    "{%- if tools %}\n    {{- '<tools>' + (tools | map('tojson') | join(',')) }}\n{%- endif %}\n"
    "{% for message in messages %}\n  {% if message.role == 'system' and not loop.first %}\n"
    "    {{ raise_exception('the system message must come first') }}\n  {% endif %}\n"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message.content | trim + '<|im_end|>' }}\n"
    "{% if loop.index0 > 3 %}{% break %}{% endif %}{% endfor %}"
    "{% generation %}{{ bos_token }}{% endgeneration %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMESPACES = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content|length %}{% endfor %}"
    "{{ ns.n }} {{ messages | tojson(indent=2) }} {{ strftime_now('%Y') | length }} {{ missing is defined }}"
)
MESSAGES = [
    {"role": "system", "content": " Be <brief> & 'kind'. "},
    {"role": "user", "content": "naïve 世界 👍\nline"},
    *({"role": "assistant", "content": f"{n}"} for n in range(5)),
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture
def templates() -> Iterator[Templates]:
    made = Templates(cpu_s=2)
    yield made
    made.close()


def rendered(template: str, **variables: Any) -> str:
    (text,), _ = chat_template_utils.render_jinja_template([MESSAGES], chat_template=template, **variables)
    return str(text)


@pytest.mark.parametrize("template", [CHATML, NAMESPACES])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_text_is_as_transformers_renders_it(templates: Templates, template: str, tools: Any) -> None:
    variables = {"tools": tools, "add_generation_prompt": True, "bos_token": "<s>"}
    expected = rendered(template, **variables)
    templates.install()
    assert rendered(template, **variables) == expected
    assert templates._idle.keys() == {template}, "it was not rendered in a process"


def test_transformers_renders_by_itself_again_after_a_close() -> None:
    """An engine that ends leaves nothing in the process that started it."""
    before = chat_template_utils._compile_jinja_template
    made = Templates()
    made.install()
    assert chat_template_utils._compile_jinja_template is not before
    made.close()
    assert chat_template_utils._compile_jinja_template is before


def test_an_idle_process_that_ended_is_replaced(templates: Templates) -> None:
    assert templates.render("{{ 1 + n }}", {"n": 1}) == "2"
    (process,) = templates._idle.values()
    process._process.kill()
    process._process.wait()
    assert templates.render("{{ 1 + n }}", {"n": 2}) == "3"
    assert list(templates._idle.values()) != [process]


def test_vllm_can_parse_a_template(templates: Templates) -> None:
    """It does with the environment of what transformers compiled, to find out how content is taken."""
    templates.install()
    tree = chat_template_utils._compile_jinja_template(CHATML).environment.parse(CHATML)
    assert "messages" in jinja2.meta.find_undeclared_variables(tree)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (CHATML, ""),
        ("", ""),
        ("{% for %}", "Expected an expression"),
        ("{{ 'x' * 2000000000 }}", "constants"),
    ],
)
def test_a_base_with_an_unusable_template_refuses_each_chat_with_the_reason(
    templates: Templates, tmp_path: Path, template: str, reason: str
) -> None:
    (tmp_path / "chat_template.jinja").write_text(template)
    given = base_template.arguments(templates, tmp_path, tmp_path / "told")
    assert bool(given) == bool(reason)
    if given:
        assert given == ["--chat-template", str(tmp_path / "told")]
        with pytest.raises(TemplateFailed, match=f"cannot be used: .*{reason}.*register the model again"):
            templates.render((tmp_path / "told").read_text(), {})


def test_a_template_s_error_is_reported_and_its_process_lives(templates: Templates) -> None:
    wrong = [{"role": "user", "content": ""}, {"role": "system", "content": ""}]
    with pytest.raises(TemplateFailed, match="the system message must come first"):
        templates.render(CHATML, {"messages": wrong})
    (process,) = templates._idle.values()
    assert templates.render(CHATML, {"messages": wrong[:1]}).startswith("<|im_start|>user")
    assert list(templates._idle.values()) == [process]


@pytest.mark.parametrize(
    ("template", "named"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "more than 2 s of CPU time",
        ),
        ("{{ 'x' * 2000000000 }}", "memory"),
        ("{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}", "recursion"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "loader"),
        ("{% for %}", "Expected an expression"),
    ],
)
def test_a_hostile_template_fails_alone(templates: Templates, template: str, named: str) -> None:
    with pytest.raises(TemplateFailed, match=named):
        templates.render(template, {"messages": []})
    assert templates.render("{{ 1 + 1 }}", {}) == "2"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 2000000000 }}",
        "{{ 'x' | center(2000000000) }}",
        "{{ ('x' * 9000000) | length }}",
        "{{ '%2000000000d' % 1 }}",
        "{% for m in messages %}{{ 'x' * 4000000 }}{{ 'y' * 4000000 }}{% endfor %}",
        "{% for %}",
    ],
)
def test_constants_of_a_template_are_computed_here_first(templates: Templates, template: str) -> None:
    """vLLM looks for a template's variables with jinja2, which computes what is constant, in its server."""
    with pytest.raises(TemplateFailed, match=r"more than 4194304 characters|Expected an expression"):
        templates.check(template)
    templates.check(CHATML)


def test_few_processes_wait(templates: Templates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "PROCESSES", 2)
    for number in range(4):
        templates.render(f"{{{{ {number} }}}}", {})
    assert list(templates._idle) == ["{{ 2 }}", "{{ 3 }}"]
