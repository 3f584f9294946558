"""Refuse checkpoints that look like a served family but are meant for something that is not served."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profiler import advice
from profiler.errors import CheckpointError
from profiler.files import is_file, shown

SENTENCE_TRANSFORMERS = ("config_sentence_transformers.json", "modules.json", "sentence_bert_config.json")
ADAPTER = "adapter_config.json"


def check_purpose(folder: Path, raw: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the model does not generate text with plain attention, or if an adapter lies
    in its folder. `raw` is the model's config."""
    embeds = next((name for name in SENTENCE_TRANSFORMERS if is_file(folder / name)), None)
    if embeds is not None:
        raise CheckpointError(
            f"by {folder / embeds} this is a model of sentence-transformers for embeddings, but only models "
            "that generate text are served; choose such a model, or, if this model generates text, run "
            f"{advice.set_aside(folder / embeds)} and register it again"
        )
    if is_file(folder / ADAPTER):
        own = advice.quoted(folder, "-adapter")
        raise CheckpointError(
            f"{folder} has a whole model and an adapter ({ADAPTER}); move the adapter away: `mkdir {own} "
            f"&& mv {advice.quoted(folder)}/adapter_* {own}`, and register the model again, if the adapter "
            "was merged into it (merge_and_unload). If it was not, or if you do not know, register the model "
            f'that "base_model_name_or_path" in {ADAPTER} names, and the adapter as its variant: `ostinato '
            f"register VARIANT --base NAME --adapter {own}`, which is right in both cases"
        )
    chunks = raw.get("dual_chunk_attention_config")
    if chunks:
        longest = chunks.get("original_max_position_embeddings") if isinstance(chunks, dict) else None
        raise CheckpointError(
            f"{folder / 'config.json'}: dual_chunk_attention_config asks for dual chunk attention "
            "(Qwen2.5-1M), which is not served; in that file delete dual_chunk_attention_config, write "
            f'"max_position_embeddings": {shown(longest or 262_144)}, and register the model again '
            "(longer prompts are then refused)"
        )
