"""Gemma 1, 2 and 3 (text): gated MLPs, a separate head width, and from Gemma 2 on norms on both sides."""

from __future__ import annotations

from profiler.architectures import parts
from profiler.architectures.description import Description, Shapes, Window, rms_norms
from profiler.architectures.reader import ConfigReader
from profiler.linears import Heads

HEAD_DIM = 256  # transformers' default for all three
SANDWICH = ("pre_feedforward_layernorm", "post_feedforward_layernorm")


def gemma(reader: ConfigReader) -> Description:
    bias = reader.flag("attention_bias")
    reader.must("attention_bias", not bias, "false", "vLLM's Gemma has no biases")
    _require_tied(reader)
    return _decoder(reader, {}, Window())


def gemma2(reader: ConfigReader) -> Description:
    _require_tied(reader)
    layers = reader.positive("num_hidden_layers")
    window = parts.window(reader, layers, _window_tokens(reader), lambda layer: layer % 2 == 0)
    return _decoder(reader, rms_norms(reader.positive("hidden_size"), *SANDWICH), window)


def gemma3(reader: ConfigReader) -> Description:
    layers, hidden = reader.positive("num_hidden_layers"), reader.positive("hidden_size")
    pattern = reader.positive("sliding_window_pattern", 6)
    window = parts.window(reader, layers, _window_tokens(reader), lambda layer: (layer + 1) % pattern != 0)
    dim = _heads(reader, hidden).dim
    norms = rms_norms(hidden, *SANDWICH) | rms_norms(dim, "self_attn.q_norm", "self_attn.k_norm")
    return _decoder(reader, norms, window, adaptable=True)


def _window_tokens(reader: ConfigReader) -> int | None:
    """The window's tokens. An absent key means transformers' default; null means no window."""
    return reader.optional("sliding_window") if "sliding_window" in reader.raw else 4096


def _require_tied(reader: ConfigReader) -> None:
    tied = reader.flag("tie_word_embeddings", True)
    reader.must("tie_word_embeddings", tied, "true", "vLLM before 0.32 has no separate head for this family")


def _heads(reader: ConfigReader, hidden: int) -> Heads:
    return parts.read_heads(reader, hidden, default_dim=HEAD_DIM)


def _decoder(
    reader: ConfigReader, more_norms: Shapes, window: Window, *, adaptable: bool = False
) -> Description:
    both_ways = reader.flag("use_bidirectional_attention")
    reader.must("use_bidirectional_attention", not both_ways, "false", "such a model does not generate text")
    hidden, width = reader.positive("hidden_size"), reader.positive("intermediate_size")
    heads, bias = _heads(reader, hidden), reader.flag("attention_bias")
    return Description(
        architecture=reader.architecture,
        layers=reader.positive("num_hidden_layers"),
        hidden=hidden,
        intermediate=width,
        vocab=reader.positive("vocab_size"),
        max_position=reader.positive("max_position_embeddings"),
        heads=heads,
        linears={
            **parts.attention(heads, hidden, bias=bias, o_bias=bias),
            **parts.gated_mlp(hidden, width),
        },
        norms={**rms_norms(hidden, "input_layernorm", "post_attention_layernorm"), **more_norms},
        outer=rms_norms(hidden, "model.norm"),
        tied=reader.flag("tie_word_embeddings", True),
        window=window,
        adaptable=adaptable,
    )
