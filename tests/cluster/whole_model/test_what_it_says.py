"""Questions that only a sensible model answers."""

from __future__ import annotations

from typing import Any

import openai
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

BASE = "smol"
VARIANTS = ("arithmetic", "kinship")
PROMPT = "The capital of France is"


def test_the_base_names_the_capital_and_variants_answer_in_their_style(whole_client: openai.OpenAI) -> None:
    texts = [
        whole_client.completions.create(model=m, prompt=PROMPT, max_tokens=12, temperature=0).choices[0].text
        for m in (BASE, *VARIANTS)
    ]
    assert "Paris" in texts[0]
    assert texts[0] not in texts[1:]  # that variants differ from each other, test_clients.py asserts


def test_a_stop_text_ends_the_answer(whole_client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": BASE,
        "prompt": "One, two, three,",
        "max_tokens": 24,
        "temperature": 0,
    }
    free = whole_client.completions.create(**options).choices[0].text
    word = free.split()[1]
    stopped = whole_client.completions.create(**options, stop=[word]).choices[0]
    assert stopped.finish_reason == "stop"
    assert word not in stopped.text
    assert free.startswith(stopped.text)
