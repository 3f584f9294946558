"""The linear layers of a hidden layer, and how tensor parallelism cuts them. Pure arithmetic.

The rules are vLLM's (0.26 to 0.32): QKVParallelLinear, MergedColumnParallelLinear, RowParallelLinear,
ReplicatedLinear, FusedMoE.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

EXPERT = "*"  # stands for an expert's number in tensor names


class Sharding(StrEnum):
    """Which part of a weight (out, in) a rank holds.

    HEADS      rows of its query heads
    KV_HEADS   rows of its key or value heads; ranks share a head where there are more ranks than heads
    QKV        the three above, fused into one weight
    COLUMN     an equal share of the rows
    ROW        an equal share of the columns; ranks' outputs are summands
    REPLICATED all of it
    """

    HEADS = "heads"
    KV_HEADS = "kv_heads"
    QKV = "qkv"
    COLUMN = "column"
    ROW = "row"
    REPLICATED = "replicated"


@dataclass(frozen=True)
class Heads:
    """Numbers of heads, and the features of each."""

    query: int
    kv: int
    dim: int

    def kv_of_rank(self, tp: int) -> int:
        """Key (or value) heads that one of `tp` ranks holds: at least one, shared if need be."""
        return max(1, self.kv // tp)


@dataclass(frozen=True)
class Linear:
    """One linear layer, or one per expert: there are `experts` of them, of which a token uses `active`.

    `fused` equal matrices are stacked in its rows (gate and up together: 2); each is cut by itself.
    """

    out: int
    into: int
    sharding: Sharding
    bias: bool = False
    fused: int = 1
    experts: int = 1
    active: int = 1

    @property
    def elements(self) -> int:
        """Number of weights in a layer, including all experts and biases."""
        return self.experts * (self.out * self.into + self.out * self.bias)

    @property
    def quantizable(self) -> bool:
        """Whether vLLM quantizes the layer; it does not quantize routers, the only replicated layers."""
        return self.sharding is not Sharding.REPLICATED

    def shard(self, tp: int, heads: Heads) -> tuple[int, int]:
        """(out, in) of one rank's part of one expert."""
        match self.sharding:
            case Sharding.HEADS:
                return heads.query // tp * heads.dim, self.into
            case Sharding.KV_HEADS:
                return heads.kv_of_rank(tp) * heads.dim, self.into
            case Sharding.QKV:
                return (heads.query // tp + 2 * heads.kv_of_rank(tp)) * heads.dim, self.into
            case Sharding.COLUMN:
                return self.out // tp, self.into
            case Sharding.ROW:
                return self.out, self.into // tp
            case Sharding.REPLICATED:
                return self.out, self.into

    def shard_elements(self, tp: int, heads: Heads) -> int:
        """Number of weights that one rank holds of the layer; a bias is cut like the rows."""
        out, into = self.shard(tp, heads)
        return self.experts * (out * into + out * self.bias)

    def problem(self, name: str, tp: int) -> str | None:
        """Why `tp` ranks cannot share the layer; None if they can. The caller checks heads."""
        if self.sharding is Sharding.COLUMN and self.out // self.fused % tp:
            return f"the {self.out // self.fused} outputs of {name} are not divisible by {tp}"
        if self.sharding is Sharding.ROW and self.into % tp:
            return f"the {self.into} inputs of {name} are not divisible by {tp}"
        if self.experts > 1 and tp > self.experts:
            return f"{name} has only {self.experts} experts for {tp} ranks"
        return None


def distinct_experts(experts: int, active: int, tokens: float) -> float:
    """The expected number of `experts` that are used when each of `tokens` picks `active` different experts.

    The router is assumed to pick uniformly: a token misses an expert with probability 1 - active / experts.
    Real routers use somewhat fewer experts.
    """
    missed: float = (1 - active / experts) ** tokens
    return experts * (1 - missed)
