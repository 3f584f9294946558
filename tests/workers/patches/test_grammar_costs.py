"""A grammar that takes too long for a token ends its request, and is not compiled again; xgrammar's own."""

from __future__ import annotations

from typing import Any

import pytest

from workers.patches.vllm import grammar_costs

WORDS = [*"abcdefghij", "ab", "abc", "</s>"]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's, over a vocabulary of a few words."""
    pytest.importorskip("vllm")
    import xgrammar
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    grammar_costs.install()
    grammar_costs.install()  # the plug-in may be registered twice
    monkeypatch.setattr(grammar_costs, "_slow", {})
    made = object.__new__(XgrammarBackend)
    info = xgrammar.TokenizerInfo(WORDS, vocab_size=len(WORDS), stop_token_ids=[len(WORDS) - 1])
    made.compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    made.vocab_size, made.num_speculative_tokens, made.disable_any_whitespace = len(WORDS), 0, False
    return made


def compiled(backend: Any, pattern: str) -> Any:
    from vllm.v1.structured_output.backend_types import StructuredOutputOptions

    return backend.compile_grammar(StructuredOutputOptions.REGEX, pattern)


def test_a_grammar_within_the_limit_continues(backend: Any) -> None:
    grammar, mask = compiled(backend, "a[bc]"), backend.allocate_token_bitmask(2)
    for token, allowed in (("a", {"a", "ab"}), ("b", {"b", "c"}), (None, {"</s>"})):
        grammar.fill_bitmask(mask, 1)
        bits = int(mask[1][0])
        assert {word for place, word in enumerate(WORDS) if bits >> place & 1} == allowed
        if token is not None:
            assert grammar.accept_tokens("r", [WORDS.index(token)])
    compiled(backend, "a[bc]")


def test_a_grammar_beyond_the_limit_ends_with_its_next_token(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_costs, "MASK_LIMIT_S", -1.0)
    slow, mask = compiled(backend, "[a-j]*"), backend.allocate_token_bitmask(1)
    slow.fill_bitmask(mask, 0)
    slow.fill_bitmask(mask, 0)  # vLLM may have asked for the step after this one
    assert int(mask[0][0]) == -1
    monkeypatch.setattr(grammar_costs, "MASK_LIMIT_S", 60.0)
    assert not slow.accept_tokens("r", [0])
    with pytest.raises(grammar_costs.SlowGrammar):
        compiled(backend, "[a-j]*")
    other = compiled(backend, "[a-i]*")
    other.fill_bitmask(mask, 0)
    assert other.accept_tokens("r", [0])


def test_the_number_of_remembered_grammars_is_bounded(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_costs, "MASK_LIMIT_S", -1.0)
    monkeypatch.setattr(grammar_costs, "KEPT", 2)
    mask = backend.allocate_token_bitmask(1)
    for pattern in ("a", "b", "c"):
        compiled(backend, pattern).fill_bitmask(mask, 0)
    compiled(backend, "a")
    for pattern in ("b", "c"):
        with pytest.raises(grammar_costs.SlowGrammar):
            compiled(backend, pattern)
