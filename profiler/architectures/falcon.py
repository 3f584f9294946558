"""Falcon: 7B with one KV head; 40B and later with the new decoder; RW with ALiBi and a KV head per head."""

from __future__ import annotations

from profiler.architectures import parts
from profiler.architectures.description import Description, Shapes, layer_norm
from profiler.architectures.reader import ConfigReader
from profiler.linears import Heads, Linear, Sharding

MAX_POSITION = 2048  # transformers' default; the first Falcons do not state it


def falcon(reader: ConfigReader) -> Description:
    hidden, bias = reader.positive("hidden_size"), reader.flag("bias")
    width = reader.positive("ffn_hidden_size", 4 * hidden)
    heads, new = _heads(reader, hidden), reader.flag("new_decoder_architecture")
    parallel = reader.flag("parallel_attn", True)
    names = ("dense_h_to_4h", "dense_4h_to_h")
    return Description(
        architecture="FalconForCausalLM",
        layers=reader.positive("num_hidden_layers"),
        hidden=hidden,
        intermediate=width,
        vocab=reader.positive("vocab_size"),
        max_position=reader.positive("max_position_embeddings", MAX_POSITION),
        heads=heads,
        linears={
            "self_attention.query_key_value": parts.fused_qkv(heads, hidden, bias),
            "self_attention.dense": Linear(hidden, hidden, Sharding.ROW, bias),
            **parts.mlp(hidden, width, names, bias),
        },
        norms=_norms(reader, hidden, new, parallel),
        outer=layer_norm("transformer.ln_f", hidden),
        tied=reader.flag("tie_word_embeddings", True),
        layer_prefix="transformer.h.",
        embedding="transformer.word_embeddings.weight",
        allreduces=1 if new or parallel else 2,  # vLLM adds attention and MLP before it reduces them
        flags={"alibi": reader.flag("alibi"), "parallel_attn": parallel},
    )


def _heads(reader: ConfigReader, hidden: int) -> Heads:
    query = reader.positive("num_attention_heads")
    if reader.flag("new_decoder_architecture"):
        kv = reader.positive("num_kv_heads", query)
    else:
        kv = 1 if reader.flag("multi_query", True) else query
    heads = parts.make_heads(reader, hidden, query, kv)
    parts.require_even_dim(reader, hidden, heads)
    return heads


def _norms(reader: ConfigReader, hidden: int, new: bool, parallel: bool) -> Shapes:
    count = reader.positive("num_ln_in_parallel_attn", 2 if new else 1)
    if not parallel:
        names = ["input_layernorm", "post_attention_layernorm"]
    else:
        names = ["ln_attn", "ln_mlp"] if count == 2 else ["input_layernorm"]
    return {key: shape for name in names for key, shape in layer_norm(name, hidden).items()}
