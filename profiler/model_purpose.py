"""Checkpoints that look like one of a served family, and are meant for something that is not served."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profiler.errors import CheckpointError
from profiler.files import is_file, shown

SENTENCE_TRANSFORMERS = ("config_sentence_transformers.json", "modules.json", "sentence_bert_config.json")
ADAPTER = "adapter_config.json"


def check_purpose(folder: Path, raw: Mapping[str, Any]) -> None:
    """Raises CheckpointError for what is no model for generating text with plain attention, `raw` being its
    config, or has an adapter beside it."""
    embeds = next((name for name in SENTENCE_TRANSFORMERS if is_file(folder / name)), None)
    if embeds is not None:
        raise CheckpointError(
            f"{folder / embeds} says that this is a model of sentence-transformers, which makes embeddings; "
            "only models that generate text are served: register the model that it was trained from, or, if "
            f"this one does generate text, move {embeds} out of the folder"
        )
    if is_file(folder / ADAPTER):
        raise CheckpointError(
            f"{folder} holds a whole model and an adapter ({ADAPTER}), which transformers would add to the "
            "model when it loads this folder; if the adapter is merged into the model already, move "
            f"{ADAPTER} and adapter_model.safetensors out of the folder; if not, put them into a folder of "
            "their own and register that as a variant of this model"
        )
    chunks = raw.get("dual_chunk_attention_config")
    if chunks:
        longest = chunks.get("original_max_position_embeddings") if isinstance(chunks, dict) else None
        raise CheckpointError(
            f"{folder / 'config.json'}: dual_chunk_attention_config (Qwen2.5-1M) asks for dual chunk "
            "attention, which is not served; register the model without -1M, or take the key out and set "
            f"max_position_embeddings to {shown(longest) if longest else 'the length it was trained with'}"
        )
