"""The known architectures, and the way from a parsed config.json to a `Description`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from profiler.architectures import falcon, gemma, gpt, llama, moe, phi
from profiler.architectures.description import Description
from profiler.architectures.reader import ConfigReader
from profiler.files import shown

# vLLM 0.26 (GPU) and 0.32 (CPU) serve all of them; each family refuses options that one of the two versions
# does not support.
FAMILIES: dict[str, Callable[[ConfigReader], Description]] = {
    "LlamaForCausalLM": llama.llama,
    "MistralForCausalLM": llama.mistral,
    "Qwen2ForCausalLM": llama.qwen2,
    "Qwen3ForCausalLM": llama.qwen3,
    "GemmaForCausalLM": gemma.gemma,
    "Gemma2ForCausalLM": gemma.gemma2,
    "Gemma3ForCausalLM": gemma.gemma3,
    "PhiForCausalLM": phi.phi,
    "Phi3ForCausalLM": phi.phi3,
    "FalconForCausalLM": falcon.falcon,
    "GPTJForCausalLM": gpt.gptj,
    "GPTNeoXForCausalLM": gpt.gpt_neox,
    "MixtralForCausalLM": moe.mixtral,
    "Qwen2MoeForCausalLM": moe.qwen2_moe,
    "Qwen3MoeForCausalLM": moe.qwen3_moe,
}
# More tensors than any published model has; listing the names of more would take too long.
MAX_TENSORS = 250_000


def describe(raw: Mapping[str, Any], where: Path) -> Description:
    """Check a parsed config.json, read from `where`; raises CheckpointError that names the wrong key."""
    reader = ConfigReader(raw, where)
    family = FAMILIES[_architecture(reader)]
    _refuse_quantized(reader)
    description = family(reader)
    reader.layer_types(description.layers)  # check these two keys always: fingerprints shorten them
    reader.natural("max_window_layers", 0)
    count = description.layers * sum(linear.experts for linear in description.linears.values())
    if count > MAX_TENSORS:
        reader.refuse(
            f"the config describes {count} matrices in {description.layers} layers, but at most "
            f"{MAX_TENSORS} are allowed"
        )
    return description


def _architecture(reader: ConfigReader) -> str:
    names = reader.raw.get("architectures")
    if names is None or names == []:
        reader.refuse(_no_architecture(reader.raw.get("model_type")))
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        reader.refuse(f'expected "architectures" to name one class, such as {EXAMPLE}, got {shown(names)}')
    name: str = names[0]
    if name not in FAMILIES:
        reader.refuse(
            f"architecture {name[:80]} is not served: {_meaning(name)}; choose a model whose config.json "
            f"names one of these architectures: {', '.join(FAMILIES)}"
        )
    return name


EXAMPLE = '["LlamaForCausalLM"]'
TEXT_ONLY = "google/gemma-3-1b-it for Gemma 3"
# What the ending of a class name means for the model.
_ENDINGS = {
    "ForConditionalGeneration": (
        "it takes images or sound in addition to text, or has an encoder; many such families also have a "
        f"text-only model, such as {TEXT_ONLY}"
    ),
    "ForSequenceClassification": "it classifies texts and generates none",
    "ForTokenClassification": "it classifies tokens and generates no text",
    "ForRewardModel": "it scores texts and generates none",
    "ForMaskedLM": "it fills in masked words and generates no text",
    "Model": (
        "it has no head for generating text, like models for embeddings (if the model is meant to generate "
        "text, load it with AutoModelForCausalLM, save it with save_pretrained, and register the result)"
    ),
}


_UNKNOWN = "Ostinato does not know how its tensors are named and sharded"


def _meaning(name: str) -> str:
    if name.endswith("LMHeadModel"):
        return _UNKNOWN
    return next((text for ending, text in _ENDINGS.items() if name.endswith(ending)), _UNKNOWN)


def _no_architecture(model_type: Any) -> str:
    """The message for a missing `architectures`: older trainers omit it; `model_type` shows which it is."""
    wanted = str(model_type).replace("_text", "").replace("_", "").lower()
    name = next((n for n in FAMILIES if n.removesuffix("ForCausalLM").lower() == wanted), None)
    example = f'["{name}"]' if name else EXAMPLE
    return (
        f'"architectures" is missing; add "architectures": {example} to that file, or copy the original '
        "config.json, and register the model again"
    )


def _refuse_quantized(reader: ConfigReader) -> None:
    quantization = reader.raw.get("quantization_config")
    if not quantization:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    reader.refuse(
        f"describes a checkpoint quantized by {shown(method) if method else 'an unnamed method'} "
        "(quantization_config); quantized checkpoints are not served: register the unquantized checkpoint"
    )
