"""Parts that families share: heads, the four projections of attention, gated MLPs, sliding windows."""

from __future__ import annotations

from collections.abc import Callable

from profiler.architectures.description import Window
from profiler.architectures.reader import ConfigReader
from profiler.linears import Heads, Linear, Sharding

Linears = dict[str, Linear]


def read_heads(reader: ConfigReader, hidden: int, default_dim: int | None = None) -> Heads:
    """Query and KV heads. A head has `head_dim` features, else `default_dim`, else hidden / heads."""
    heads = reader.positive("num_attention_heads")
    return make_heads(reader, hidden, heads, reader.positive("num_key_value_heads", heads), default_dim)


def make_heads(
    reader: ConfigReader, hidden: int, query: int, kv: int, default_dim: int | None = None
) -> Heads:
    if query % kv:
        reader.refuse(
            f"expected a number of attention heads divisible by the {kv} key/value heads, got {query}"
        )
    dim = reader.optional("head_dim") or default_dim
    return Heads(query, kv, dim or even_dim(reader, hidden, query))


def even_dim(reader: ConfigReader, hidden: int, heads: int) -> int:
    if hidden % heads:
        reader.refuse(f"expected hidden_size divisible by the {heads} attention heads, got {hidden}")
    return hidden // heads


def require_even_dim(reader: ConfigReader, hidden: int, heads: Heads) -> None:
    """Check that head_dim is hidden / heads, for families whose head_dim vLLM does not read."""
    if heads.dim * heads.query != hidden:
        reader.refuse(
            f"expected head_dim to be hidden_size / heads ({hidden} / {heads.query}), got {heads.dim}: vLLM "
            "has no other head_dim for this architecture"
        )


def attention(
    heads: Heads,
    hidden: int,
    *,
    bias: bool = False,
    o_bias: bool = False,
    at: str = "self_attn",
    o: str = "o_proj",
) -> Linears:
    """Separate projections for queries, keys and values, and the output projection."""
    q, kv = heads.query * heads.dim, heads.kv * heads.dim
    return {
        f"{at}.q_proj": Linear(q, hidden, Sharding.HEADS, bias),
        f"{at}.k_proj": Linear(kv, hidden, Sharding.KV_HEADS, bias),
        f"{at}.v_proj": Linear(kv, hidden, Sharding.KV_HEADS, bias),
        f"{at}.{o}": Linear(hidden, q, Sharding.ROW, o_bias),
    }


def fused_qkv(heads: Heads, hidden: int, bias: bool = False) -> Linear:
    """Queries, keys and values in one matrix."""
    return Linear((heads.query + 2 * heads.kv) * heads.dim, hidden, Sharding.QKV, bias)


def gated_mlp(
    hidden: int, width: int, *, at: str = "mlp", bias: bool = False, experts: int = 1, active: int = 1
) -> Linears:
    return {
        f"{at}.gate_proj": Linear(width, hidden, Sharding.COLUMN, bias, experts=experts, active=active),
        f"{at}.up_proj": Linear(width, hidden, Sharding.COLUMN, bias, experts=experts, active=active),
        f"{at}.down_proj": Linear(hidden, width, Sharding.ROW, bias, experts=experts, active=active),
    }


def mlp(hidden: int, width: int, names: tuple[str, str], bias: bool) -> Linears:
    """Up and down projections without a gate."""
    up, down = names
    return {
        f"mlp.{up}": Linear(width, hidden, Sharding.COLUMN, bias),
        f"mlp.{down}": Linear(hidden, width, Sharding.ROW, bias),
    }


def window(
    reader: ConfigReader, layers: int, tokens: int | None, slides: Callable[[int], bool] = lambda _: True
) -> Window:
    """The window of a model. `layer_types` lists the sliding layers, or else `slides` picks them by
    number."""
    types = reader.layer_types(layers)
    if tokens is None:
        return Window()
    count = sum(t == "sliding_attention" for t in types) if types else sum(map(slides, range(layers)))
    return Window(tokens, count) if count else Window()


def qwen_window(reader: ConfigReader, layers: int) -> Window:
    """Qwen's windows: a separate key switches them on, from a certain layer on."""
    first = reader.natural("max_window_layers", 28)
    tokens = reader.positive("sliding_window", 4096) if reader.flag("use_sliding_window") else None
    return window(reader, layers, tokens, lambda layer: layer >= first)
