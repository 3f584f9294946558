"""Models of published dimensions, and plans of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from profiler.plans import even_stages
from profiler.types import DeviceRates, ModelSpec, Plan


def llama(
    layers: int, hidden: int, heads: int, kv: int, inter: int, vocab: int, size: int, *, tied: bool
) -> ModelSpec:
    """A Llama's facts from its published dimensions, by hand."""
    dim = hidden // heads
    linear = {
        "q_proj": (hidden, hidden), "k_proj": (kv * dim, hidden), "v_proj": (kv * dim, hidden),
        "o_proj": (hidden, hidden), "gate_proj": (inter, hidden), "up_proj": (inter, hidden),
        "down_proj": (hidden, inter),
    }  # fmt: skip
    layer = 2 * hidden * hidden + 2 * kv * dim * hidden + 3 * inter * hidden + 2 * hidden
    other = vocab * hidden * (1 if tied else 2) + hidden
    return ModelSpec(
        "LlamaForCausalLM",
        layers,
        hidden,
        heads,
        kv,
        dim,
        vocab,
        4096,
        size,
        layer * size,
        other * size,
        linear,
    )


def llama_config(
    layers: int, hidden: int, heads: int, kv: int, inter: int, vocab: int, **more: Any
) -> dict[str, Any]:
    """What config.json holds for such a Llama in bfloat16."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": inter,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **more,
    }


SMOLLM2 = llama(30, 576, 9, 3, 1536, 49152, 4, tied=True)
LLAMA_7B = llama(32, 4096, 32, 32, 11008, 32000, 2, tied=False)
LLAMA_7B_CONFIG = llama_config(32, 4096, 32, 32, 11008, 32000)
RATES = DeviceRates(20e9, 100e9)


def plan(spec: ModelSpec = SMOLLM2, tp: int = 1, pp: int = 1, **changes: Any) -> Plan:
    base = Plan(tp, even_stages(spec.num_layers, pp), "none", 2048, 0, 0, 0)
    return replace(base, **changes)
