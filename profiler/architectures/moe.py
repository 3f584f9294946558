"""Mixtral, Qwen2-MoE and Qwen3-MoE: every layer has a router and many experts instead of the MLP."""

from __future__ import annotations

from profiler.architectures import parts
from profiler.architectures.description import Description, Shapes, Window, rms_norms
from profiler.architectures.parts import Linears
from profiler.architectures.reader import ConfigReader
from profiler.files import shown
from profiler.linears import EXPERT, Heads, Linear, Sharding


def mixtral(reader: ConfigReader) -> Description:
    hidden, width = reader.positive("hidden_size"), reader.positive("intermediate_size")
    experts, active = _experts(reader, "num_local_experts", "num_experts", 2)
    at = f"block_sparse_moe.experts.{EXPERT}"
    linears = {
        "block_sparse_moe.gate": Linear(experts, hidden, Sharding.REPLICATED),
        f"{at}.w1": Linear(width, hidden, Sharding.COLUMN, experts=experts, active=active),
        f"{at}.w2": Linear(hidden, width, Sharding.ROW, experts=experts, active=active),
        f"{at}.w3": Linear(width, hidden, Sharding.COLUMN, experts=experts, active=active),
    }
    window = parts.window(reader, reader.positive("num_hidden_layers"), reader.optional("sliding_window"))
    return _decoder(reader, parts.read_heads(reader, hidden), width, linears, window)


def qwen2_moe(reader: ConfigReader) -> Description:
    hidden, shared = reader.positive("hidden_size"), reader.positive("shared_expert_intermediate_size")
    heads = parts.read_heads(reader, hidden)
    parts.require_even_dim(reader, hidden, heads)
    bias = reader.flag("qkv_bias", True)
    reader.must("qkv_bias", bias, "true", "vLLM's Qwen2-MoE always has these biases")
    linears = {
        **_qwen_experts(reader, hidden),
        **parts.gated_mlp(hidden, shared, at="mlp.shared_expert"),
        "mlp.shared_expert_gate": Linear(1, hidden, Sharding.REPLICATED),
    }
    window = _qwen_window(reader)
    return _decoder(reader, heads, reader.positive("moe_intermediate_size"), linears, window, qkv_bias=True)


def qwen3_moe(reader: ConfigReader) -> Description:
    hidden = reader.positive("hidden_size")
    bias = reader.flag("attention_bias")
    reader.must("attention_bias", not bias, "false", "vLLM drops the bias of Qwen3's o_proj")
    heads = parts.read_heads(reader, hidden)
    norms = rms_norms(heads.dim, "self_attn.q_norm", "self_attn.k_norm")
    width, linears = reader.positive("moe_intermediate_size"), _qwen_experts(reader, hidden)
    return _decoder(reader, heads, width, linears, _qwen_window(reader), more_norms=norms)


def _experts(
    reader: ConfigReader, key: str, alias: str, default_active: int | None = None
) -> tuple[int, int]:
    """The number of experts, and how many of them a token uses."""
    experts = reader.positive(key, alias=alias)
    active = reader.positive("num_experts_per_tok", default_active)
    if active > experts:
        reader.refuse(f"expected num_experts_per_tok of at most the {experts} experts, got {active}")
    return experts, active


def _qwen_experts(reader: ConfigReader, hidden: int) -> Linears:
    _require_alike(reader)
    experts, active = _experts(reader, "num_experts", "num_local_experts")
    width, at = reader.positive("moe_intermediate_size"), f"mlp.experts.{EXPERT}"
    return {
        "mlp.gate": Linear(experts, hidden, Sharding.REPLICATED),
        **parts.gated_mlp(hidden, width, at=at, experts=experts, active=active),
    }


def _require_alike(reader: ConfigReader) -> None:
    """Check that all layers have experts: the model must equal one layer times the number of layers."""
    step, dense = reader.natural("decoder_sparse_step", 1), reader.raw.get("mlp_only_layers")
    reason = "the layers differ, which Ostinato cannot plan yet"
    reader.must("decoder_sparse_step", step == 1, "1", reason)
    if dense is not None and not isinstance(dense, list):
        reader.refuse(f"expected mlp_only_layers to be a list, got {shown(dense)}")
    reader.must("mlp_only_layers", not dense, "empty", reason)


def _qwen_window(reader: ConfigReader) -> Window:
    """No window. vLLM cannot give windows to some layers of these families; published models use none."""
    on = reader.flag("use_sliding_window")
    reader.must("use_sliding_window", not on, "false", "vLLM has no sliding windows for this family")
    return Window()


def _decoder(
    reader: ConfigReader,
    heads: Heads,
    width: int,
    mlp: Linears,
    window: Window,
    *,
    qkv_bias: bool = False,
    more_norms: Shapes | None = None,
) -> Description:
    hidden = reader.positive("hidden_size")
    return Description(
        architecture=reader.architecture,
        layers=reader.positive("num_hidden_layers"),
        hidden=hidden,
        intermediate=width,
        vocab=reader.positive("vocab_size"),
        max_position=reader.positive("max_position_embeddings"),
        heads=heads,
        linears={**parts.attention(heads, hidden, bias=qkv_bias), **mlp},
        norms={**rms_norms(hidden, "input_layernorm", "post_attention_layernorm"), **(more_norms or {})},
        outer=rms_norms(hidden, "model.norm"),
        tied=reader.flag("tie_word_embeddings"),
        window=window,
    )
