"""Llama, Mistral, Qwen2 and Qwen3; their variants can be served."""

from __future__ import annotations

from profiler.architectures import parts
from profiler.architectures.description import Description, Window, rms_norms
from profiler.architectures.reader import ConfigReader
from profiler.linears import Heads


def llama(reader: ConfigReader) -> Description:
    bias = reader.flag("attention_bias")
    return _decoder(reader, qkv_bias=bias, o_bias=bias, mlp_bias=reader.flag("mlp_bias"))


def mistral(reader: ConfigReader) -> Description:
    layers = reader.positive("num_hidden_layers")
    absent = "sliding_window" not in reader.raw  # absent means transformers' default, null means none
    tokens = 4096 if absent else reader.optional("sliding_window")
    return _decoder(reader, window=parts.window(reader, layers, tokens))


def qwen2(reader: ConfigReader) -> Description:
    layers, hidden = reader.positive("num_hidden_layers"), reader.positive("hidden_size")
    heads = parts.read_heads(reader, hidden)
    parts.require_even_dim(reader, hidden, heads)
    window = parts.qwen_window(reader, layers)
    if 0 < window.layers < layers:
        reader.refuse(
            "use_sliding_window is true for only some layers (max_window_layers, layer_types), but vLLM "
            "serves Qwen2 with a window in all layers or in none; choose another model"
        )
    return _decoder(reader, heads=heads, qkv_bias=True, window=window)


def qwen3(reader: ConfigReader) -> Description:
    layers, hidden = reader.positive("num_hidden_layers"), reader.positive("hidden_size")
    bias = reader.flag("attention_bias")
    reader.must("attention_bias", not bias, "false", "vLLM drops the bias of Qwen3's o_proj")
    heads = parts.read_heads(reader, hidden, default_dim=128)
    return _decoder(reader, heads=heads, qk_norm=True, window=parts.qwen_window(reader, layers))


def _decoder(
    reader: ConfigReader,
    *,
    heads: Heads | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    window: Window | None = None,
) -> Description:
    hidden, width = reader.positive("hidden_size"), reader.positive("intermediate_size")
    heads = heads or parts.read_heads(reader, hidden)
    norms = rms_norms(hidden, "input_layernorm", "post_attention_layernorm")
    if qk_norm:
        norms |= rms_norms(heads.dim, "self_attn.q_norm", "self_attn.k_norm")
    return Description(
        architecture=reader.architecture,
        layers=reader.positive("num_hidden_layers"),
        hidden=hidden,
        intermediate=width,
        vocab=reader.positive("vocab_size"),
        max_position=reader.positive("max_position_embeddings"),
        heads=heads,
        linears={
            **parts.attention(heads, hidden, bias=qkv_bias, o_bias=o_bias),
            **parts.gated_mlp(hidden, width, bias=mlp_bias),
        },
        norms=norms,
        outer=rms_norms(hidden, "model.norm"),
        tied=reader.flag("tie_word_embeddings"),
        window=window or parts.window(reader, reader.positive("num_hidden_layers"), None),
        adaptable=True,
        flags={"qkv_bias": qkv_bias, "o_bias": o_bias, "mlp_bias": mlp_bias, "qk_norm": qk_norm},
    )
