"""Our arithmetic in the layers of a built model: each layer's `quant_method`, and a norm's class.

vLLM itself changes the arithmetic of linear layers by `quant_method`; an embedding and a head have one, too.
A norm has none, so it gets a subclass of its class.
"""

from __future__ import annotations

from typing import Any

from profiler.patches.target import Target

_LINEAR = "vllm.model_executor.layers.linear"
_VOCABULARY = "vllm.model_executor.layers.vocab_parallel_embedding"
LINEAR = Target(_LINEAR, "LinearBase.quant_method", read={"0.26": "5bb077ca274a", "0.32": "5bb077ca274a"})
EMBEDDING = Target(
    _VOCABULARY, "VocabParallelEmbedding.quant_method", read={"0.26": "510dc511e397", "0.32": "510dc511e397"}
)
NORM = Target(
    "vllm.model_executor.custom_op", "CustomOp.forward", read={"0.26": "211cc33c43f2", "0.32": "211cc33c43f2"}
)  # of norms; a subclass overrides it


def put_linear(layer: Any, method: Any) -> None:
    """Make a linear layer compute by `method`."""
    LINEAR.replace(lambda _: method, layer)
    layer.requires_unquantized_input = True  # otherwise vLLM would fuse its activation with quantizing


def put_embedding(layer: Any, method: Any) -> None:
    """Make an embedding look tokens up by `method`."""
    EMBEDDING.replace(lambda _: method, layer)
    layer.use_fused_embedding = False  # otherwise ranks on GPUs do not ask the quant_method (vLLM 0.32)


def put_head(layer: Any, method: Any) -> None:
    """Make a head compute by `method`."""
    EMBEDDING.replace(lambda _: method, layer)


def put_norm(layer: Any, kind: type) -> None:
    """Make a norm compute by `kind`, a subclass of its class."""
    layer.__class__ = kind
