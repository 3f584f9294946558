"""GPT-J and GPT-NeoX: parallel attention and MLP, LayerNorms with biases."""

from __future__ import annotations

from profiler.architectures import parts
from profiler.architectures.description import Description, layer_norm
from profiler.architectures.reader import ConfigReader
from profiler.linears import Linear, Sharding


def gptj(reader: ConfigReader) -> Description:
    hidden = reader.positive("n_embd", alias="hidden_size")
    width = reader.positive("n_inner", 4 * hidden)
    query = reader.positive("n_head", alias="num_attention_heads")
    heads = parts.make_heads(reader, hidden, query, query)
    parts.require_even_dim(reader, hidden, heads)
    rotary = reader.positive("rotary_dim", 64)
    reader.must("rotary_dim", rotary % 2 == 0, "even", "features are rotated in pairs")
    reader.must("rotary_dim", rotary <= heads.dim, f"at most {heads.dim}", "a head has no more features")
    untied = not reader.flag("tie_word_embeddings")
    reader.must("tie_word_embeddings", untied, "false", "vLLM's GPT-J has a separate head")
    return Description(
        architecture="GPTJForCausalLM",
        layers=reader.positive("n_layer", alias="num_hidden_layers"),
        hidden=hidden,
        intermediate=width,
        vocab=reader.positive("vocab_size"),
        max_position=reader.positive("n_positions", alias="max_position_embeddings"),
        heads=heads,
        linears={
            **parts.attention(heads, hidden, at="attn", o="out_proj"),
            **parts.mlp(hidden, width, ("fc_in", "fc_out"), bias=True),
        },
        norms=layer_norm("ln_1", hidden),
        outer=layer_norm("transformer.ln_f", hidden),
        layer_prefix="transformer.h.",
        embedding="transformer.wte.weight",
        head_bias=True,
        skipped=("attn.bias", "attn.masked_bias"),  # causal masks that older transformers stored
    )


def gpt_neox(reader: ConfigReader) -> Description:
    hidden, width = reader.positive("hidden_size"), reader.positive("intermediate_size")
    query, bias = reader.positive("num_attention_heads"), reader.flag("attention_bias", True)
    heads = parts.make_heads(reader, hidden, query, query)
    parts.require_even_dim(reader, hidden, heads)
    names = ("dense_h_to_4h", "dense_4h_to_h")
    return Description(
        architecture="GPTNeoXForCausalLM",
        layers=reader.positive("num_hidden_layers"),
        hidden=hidden,
        intermediate=width,
        vocab=reader.positive("vocab_size"),
        max_position=reader.positive("max_position_embeddings"),
        heads=heads,
        linears={
            "attention.query_key_value": parts.fused_qkv(heads, hidden, bias),
            "attention.dense": Linear(hidden, hidden, Sharding.ROW, bias),
            **parts.mlp(hidden, width, names, bias=True),
        },
        norms=layer_norm("input_layernorm", hidden) | layer_norm("post_attention_layernorm", hidden),
        outer=layer_norm("gpt_neox.final_layer_norm", hidden),
        tied=reader.flag("tie_word_embeddings"),
        layer_prefix="gpt_neox.layers.",
        embedding="gpt_neox.embed_in.weight",
        head="embed_out.weight",
        flags={"parallel_residual": reader.flag("use_parallel_residual", True)},
        skipped=("attention.bias", "attention.masked_bias"),  # causal masks that older transformers stored
    )
