"""A request for a deployment, and the limits it must keep."""

from __future__ import annotations

from dataclasses import dataclass, field

from placement.types import CostMeasure, Intent, Scope, Slos
from profiler.types import ModelSpec


@dataclass(frozen=True)
class Compression:
    """One registered compression of a model: unsharded bytes of a layer and a cached token, its accuracy.

    TP must be one of `degrees`, if there are any, as well as one of the model's. A model's accuracies and a
    request's limit have one unit: shares in what-if files, else percent.
    """

    name: str
    accuracy: float
    layer_bytes: int
    kv_bytes_per_token: int
    degrees: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelFigures:
    """A model of `layers` equal layers.

    `embedding_bytes` lie on the first stage, `head_bytes` on the last (both unsharded). A `tied` head is the
    embedding, and only a pipeline's last stage needs a copy; with `tables_everywhere` every stage has both.
    `overhead_bytes` is what every rank needs in addition to weights and KV cache (runtime, activations,
    graphs), `last_overhead_bytes` what a rank of the last stage needs on top. `hidden_bytes` is one token's
    hidden state, `layer_flops` the FLOPs of one token in one layer. With a `spec`, estimates are made from
    the spec instead, and TP must be one of `degrees`.
    """

    name: str
    layers: int
    heads: int
    kv_heads: int
    embedding_bytes: int
    head_bytes: int
    hidden_bytes: int
    layer_flops: float
    overhead_bytes: int
    compressions: tuple[Compression, ...]
    tied: bool = False
    last_overhead_bytes: int = 0
    tables_everywhere: bool = False
    spec: ModelSpec | None = None
    degrees: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check the figures. Raises ValueError if they are impossible."""
        counts = {"layers": self.layers, "heads": self.heads, "kv_heads": self.kv_heads}
        sizes = {
            "embedding_bytes": self.embedding_bytes,
            "head_bytes": self.head_bytes,
            "overhead_bytes": self.overhead_bytes,
            "last_overhead_bytes": self.last_overhead_bytes,
        }
        wrong = [f"{name} {value} (expected 1 or more)" for name, value in counts.items() if value < 1]
        wrong += [f"{name} {value} (expected 0 or more)" for name, value in sizes.items() if value < 0]
        if self.heads % max(1, self.kv_heads):
            wrong.append(f"{self.heads} heads for {self.kv_heads} KV heads (expected a multiple)")
        if not self.hidden_bytes > 0 or not self.layer_flops > 0:
            wrong.append("hidden_bytes and layer_flops (expected positive)")
        if not self.compressions:
            wrong.append("no compression (expected at least 'none')")
        for compression in self.compressions:
            if compression.layer_bytes < 1 or compression.kv_bytes_per_token < 0 or compression.accuracy < 0:
                wrong.append(f"{compression} (expected layer_bytes >= 1, kv bytes >= 0, accuracy >= 0)")
        if wrong:
            raise ValueError(f"model {self.name}: " + "; ".join(wrong))


@dataclass(frozen=True)
class Request:
    """One copy of a model to place.

    `rate_per_s` requests of `input_tokens` and `output_tokens` are expected each second. The KV cache holds
    `concurrency` sequences of both lengths together, or of `context` tokens, or of `sequence_tokens`, and
    always one sequence of `context` tokens. `headroom` is the share of each GPU's total memory to leave free.
    TP and PP are at most `max_tp` and `max_pp`, and among `only_tp` and `only_pp` if there are any; `layers`
    fixes the split of a pipeline. Requests of one `group` share no GPU or no node, depending on `scope`.
    """

    name: str
    model: ModelFigures
    intent: Intent = Intent.MIN_COST
    cost: CostMeasure = CostMeasure.MEMORY_LATENCY
    slos: Slos = field(default_factory=Slos)
    rate_per_s: float = 0.0
    input_tokens: int = 512
    output_tokens: int = 128
    concurrency: int = 8
    max_tp: int = 8
    max_pp: int = 8
    only_tp: tuple[int, ...] = ()
    only_pp: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()
    context: int = 0
    sequence_tokens: int = 0
    headroom: float = 0.0
    group: str = ""
    scope: Scope = Scope.NONE

    def __post_init__(self) -> None:
        """Check the request. Raises ValueError if it makes no sense."""
        least = min(self.input_tokens, self.output_tokens, self.concurrency, self.max_tp, self.max_pp)
        if least < 1:
            raise ValueError(f"{self.name}: expected lengths, concurrency, max_tp and max_pp of 1 or more")
        if not 0 <= self.headroom < 1:
            raise ValueError(f"{self.name}: expected headroom of at least 0 and below 1, got {self.headroom}")
        if not 0 <= self.rate_per_s < float("inf"):
            raise ValueError(f"{self.name}: expected rate_per_s of at least 0, got {self.rate_per_s}")
        if self.layers and (min(self.layers) < 1 or sum(self.layers) != self.model.layers):
            raise ValueError(
                f"{self.name}: expected the stages' layers to add up to {self.model.layers}, got "
                f"{self.layers}"
            )
        if self.scope is not Scope.NONE and not self.group:
            raise ValueError(f"{self.name}: anti-affinity with scope {self.scope} needs the name of a group")

    @property
    def kv_tokens(self) -> int:
        each = self.sequence_tokens or self.context or self.input_tokens + self.output_tokens
        return max(self.context, self.concurrency * each)
