"""Phi-1 and Phi-2 (PhiForCausalLM); Phi-3 and later (Phi3ForCausalLM), which have fused projections."""

from __future__ import annotations

from profiler.architectures import parts
from profiler.architectures.description import Description, layer_norm, rms_norms
from profiler.architectures.reader import ConfigReader
from profiler.linears import Heads, Linear, Sharding


def phi(reader: ConfigReader) -> Description:
    hidden, width = reader.positive("hidden_size"), reader.positive("intermediate_size")
    heads = parts.read_heads(reader, hidden)
    _require_what_vllm_has(reader, hidden, width, heads)
    return Description(
        architecture="PhiForCausalLM",
        layers=reader.positive("num_hidden_layers"),
        hidden=hidden,
        intermediate=width,
        vocab=reader.positive("vocab_size"),
        max_position=reader.positive("max_position_embeddings"),
        heads=heads,
        linears={
            **parts.attention(heads, hidden, bias=True, o_bias=True, o="dense"),
            **parts.mlp(hidden, width, ("fc1", "fc2"), bias=True),
        },
        norms=layer_norm("input_layernorm", hidden),
        outer=layer_norm("model.final_layernorm", hidden),
        head_bias=True,
    )


def _require_what_vllm_has(reader: ConfigReader, hidden: int, width: int, heads: Heads) -> None:
    """Check keys that vLLM 0.26's Phi does not read; every published Phi-1 and Phi-2 has the expected
    values."""
    parts.require_even_dim(reader, hidden, heads)
    untied = not reader.flag("tie_word_embeddings")
    reader.must("tie_word_embeddings", untied, "false", "the head has a bias")
    reader.must("qk_layernorm", not reader.flag("qk_layernorm"), "false", "vLLM's Phi has no such norms")
    reader.must(
        "num_key_value_heads", heads.kv == heads.query, str(heads.query), "vLLM's Phi has no other number"
    )
    reader.must("intermediate_size", width == 4 * hidden, f"{4 * hidden}", "vLLM's Phi has no other width")


def phi3(reader: ConfigReader) -> Description:
    layers = reader.positive("num_hidden_layers")
    hidden, width = reader.positive("hidden_size"), reader.positive("intermediate_size")
    heads = parts.read_heads(reader, hidden)
    reader.must("attention_bias", not reader.flag("attention_bias"), "false", "Phi-3 stores no biases")
    return Description(
        architecture="Phi3ForCausalLM",
        layers=layers,
        hidden=hidden,
        intermediate=width,
        vocab=reader.positive("vocab_size"),
        max_position=reader.positive("max_position_embeddings"),
        heads=heads,
        linears={
            "self_attn.qkv_proj": parts.fused_qkv(heads, hidden),
            "self_attn.o_proj": Linear(hidden, heads.query * heads.dim, Sharding.ROW),
            "mlp.gate_up_proj": Linear(2 * width, hidden, Sharding.COLUMN, fused=2),
            "mlp.down_proj": Linear(hidden, width, Sharding.ROW),
        },
        norms=rms_norms(hidden, "input_layernorm", "post_attention_layernorm"),
        outer=rms_norms(hidden, "model.norm"),
        tied=reader.flag("tie_word_embeddings"),
        window=parts.window(reader, layers, reader.optional("sliding_window")),
    )
