"""Tokenizers small enough to be written into any test's folder."""

from __future__ import annotations

# A tokenizer.json of one word, for folders whose texts are not read.
ONE_WORD = """{"version": "1.0", "added_tokens": [],
"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}"""
