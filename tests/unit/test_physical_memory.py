"""Memory of ranks, against sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.measurements import Footprint, RankMemory, Setting
from profiler.physical.calibration import Calibration, Cut
from profiler.physical.memory import RankBytes, known_ranks, kv_tokens, rank_bytes
from testkit.known_models import LLAMA_7B, plan

MIB = 2**20


def footprint(layers: tuple[int, ...], tp: int, *ranks: tuple[int, int, int]) -> Footprint:
    """Ranks by activations, graphs and runtime, in MiB."""
    memory = (RankMemory(1, a * MIB, g * MIB, r * MIB, 0, 0) for a, g, r in ranks)
    return Footprint(Setting(layers, tp), tuple(memory), 1.0)


CALIBRATION = Calibration(
    LLAMA_7B,
    8192,
    {},
    footprints=(
        footprint((8,), 1, (300, 180, 500)),
        footprint((16,), 1, (300, 260, 500)),  # 100 MiB and 10 for each layer
        footprint((16, 16), 1, (120, 260, 700), (300, 260, 700)),
    ),
)


def test_each_rank_of_an_uneven_pipeline() -> None:
    """Llama-2-7B in bfloat16: a layer is 4 x 4096^2 + 3 x 4096 x 11008 + 2 x 4096 numbers."""
    layer = 2 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096)
    table = 2 * 32000 * 4096
    split = plan(LLAMA_7B, pp=2, layers_per_stage=(10, 22))
    first, last = rank_bytes(CALIBRATION, Cut(1), split)
    assert first.weights == 10 * layer + table
    assert last.weights == 22 * layer + table + 2 * 4096
    assert (first.activations, last.activations) == (120 * MIB, 300 * MIB)
    assert first.graphs == pytest.approx(200 * MIB, abs=MIB)
    assert last.graphs == pytest.approx(320 * MIB, abs=MIB)
    assert first.runtime == last.runtime == 700 * MIB
    assert (first.kv_per_token, last.kv_per_token) == (10 * 16384, 22 * 16384)


def test_a_rank_needs_what_ranks_in_its_place_needed() -> None:
    """Qwen2.5-14B's on H200s: what holds the embedding needs a copy of it for a moment; what talks to others
    has channels."""
    seen = (
        footprint((32,), 1, (1526, 638, 757)),
        footprint((16, 16), 1, (1526, 660, 1525), (315, 638, 1527)),
    )
    known = Calibration(LLAMA_7B, 8192, {}, footprints=seen)

    def needed(*split: int) -> list[tuple[int, int]]:
        ranks = rank_bytes(known, Cut(1), plan(LLAMA_7B, layers_per_stage=split, pp=len(split)))
        return [(rank.activations // MIB, rank.runtime // MIB) for rank in ranks]

    assert needed(32) == [(1526, 757)]
    assert needed(10, 22) == [(1526, 1527), (315, 1527)]
    assert needed(8, 8, 8, 8) == [(1526, 1527), (315, 1527), (315, 1527), (315, 1527)]


def test_engines_with_variants_capture_their_graphs_twice() -> None:
    """Llama-2-7B on an H200: vLLM said that graphs took 0.54 GiB without variants (0.44 with half the
    layers), and 0.77 GiB in an engine with four slots for LoRAs."""
    seen = (footprint((32,), 1, (416, 554, 757)), footprint((16,), 1, (416, 454, 757)))
    known = Calibration(LLAMA_7B, 8192, {}, footprints=seen)
    alone = plan(LLAMA_7B)
    (without,) = rank_bytes(known, Cut(1), alone)
    (with_slots,) = rank_bytes(known, Cut(1), replace(alone, max_variants=4))
    assert without.graphs == pytest.approx(554 * MIB, rel=0.01)
    assert with_slots.graphs == pytest.approx(0.77 * 1024 * MIB, rel=0.05)


def test_a_rank_needs_the_memory_that_its_device_counts() -> None:
    """Qwen2.5-14B's ranks on H200s in MB: parts, and what was held. The allocator gave most of a pass's peak
    back, but graphs were captured after it; what a last stage took with its first step is in no part."""
    mb = 10**6

    def held(layers: tuple[int, ...], *ranks: tuple[int, int, int, int, int], tp: int = 1) -> Footprint:
        memory = (
            RankMemory(w * mb, a * mb, g * mb, r * mb, 9 * mb, 1, (h + 9) * mb) for w, a, g, r, h in ranks
        )
        return Footprint(Setting(layers, tp), tuple(memory), 1.0)

    alone = held((32,), (4222, 1600, 837, 794, 6265))
    stages = held((16, 16), (2663, 1600, 692, 1600, 5890), (2663, 330, 669, 1600, 6502))
    known = Calibration(LLAMA_7B, 8192, {}, footprints=(alone, stages))

    def needed(tp: int, *split: int) -> list[int]:
        """The memory without weights."""
        ranks = rank_bytes(known, Cut(tp), plan(LLAMA_7B, tp=tp, layers_per_stage=split, pp=len(split)))
        return [(rank.activations + rank.runtime) // mb for rank in ranks[::tp]]

    assert needed(1, 32) == [1600 - 837 + 794]
    assert needed(1, 16, 16) == [5890 - 2663 - 692, 6502 - 2663 - 669]
    assert needed(1, 8, 16, 8)[1] == needed(1, 16, 16)[1], "between others as the last"
    # Where none was cut so, a stage takes with its first step what the one took that took most.
    two = held((32,), *[(2120, 862, 862, 1712, 5160)] * 2, tp=2)
    known = replace(known, footprints=(alone, stages, two))
    assert needed(2, 32) == [5160 - 2120 - 862]
    assert needed(2, 16, 16) == [5160 - 2120 - 862 + 6502 - (2663 + 330 + 669 + 1600)] * 2


def test_a_quantization_that_was_measured_alone_is_placed_as_the_model_is() -> None:
    """In fp8 one GPU was measured; in bfloat16 also stages, of which the last took 933 MiB later."""
    held = (RankMemory(1, 269 * MIB, 532 * MIB, 1522 * MIB, 0, 0, (269 + 532 + 1522 + 933) * MIB + 1),)
    stages = footprint((16, 16), 1, (282, 548, 1525), (0, 0, 0))
    stages = replace(stages, ranks=stages.ranks[:1] + held)
    fp8 = replace(footprint((32,), 1, (290, 644, 757)), setting=Setting((32,), 1, "fp8"))
    two = replace(footprint((32,), 2, *[(202, 554, 2239)] * 2), setting=Setting((32,), 2, "fp8"))
    known = Calibration(
        LLAMA_7B, 8192, {}, footprints=(footprint((32,), 1, (400, 638, 757)), stages, fp8, two)
    )
    halves = plan(LLAMA_7B, pp=2, quantization="fp8")
    first, last = rank_bytes(known, Cut(1, "fp8"), halves)
    assert (first.activations // MIB, last.activations // MIB) == (282, 269)
    assert (first.runtime // MIB, last.runtime // MIB) == (1525, 1525 + 933), "not TP's, of mixtures larger"
    (alone,) = rank_bytes(known, Cut(1, "fp8"), plan(LLAMA_7B, quantization="fp8"))
    assert (alone.activations // MIB, alone.runtime // MIB) == (290, 757), "it has a place of its own"
    (tp, *_) = rank_bytes(
        replace(known, footprints=(*known.footprints[:3], footprint((32,), 2, *[(202, 554, 2239)] * 2))),
        Cut(2, "fp8"),
        plan(LLAMA_7B, tp=2, quantization="fp8"),
    )
    assert tp.runtime // MIB == 2239, "not that of stages"
    placed = known_ranks(known, Cut(1, "fp8"))
    assert all(placed.is_of_other_quantization(halves, stage) for stage in (0, 1))
    assert not known_ranks(known, Cut(1)).is_of_other_quantization(halves, 0)


def test_graphs_take_what_a_pass_gave_back() -> None:
    """Qwen2.5-14B in 24 and in 48 layers: 1132 MiB of the peak were given back, more than graphs of either
    take, so that a rank needs what it needed at the peak."""
    seen = [(24, 638), (48, 798)]
    ranks = [
        RankMemory(1, 1526 * MIB, g * MIB, 757 * MIB, 0, 0, (1526 + g + 757 - 1132) * MIB) for _, g in seen
    ]
    prints = [Footprint(Setting((n,)), (rank,), 1.0) for (n, _), rank in zip(seen, ranks, strict=True)]
    known = Calibration(LLAMA_7B, 8192, {}, footprints=tuple(prints))
    for layers in (24, 32, 48):
        (rank,) = rank_bytes(known, Cut(1), plan(LLAMA_7B, layers_per_stage=(layers,)))
        assert (rank.activations + rank.graphs + rank.runtime) // MIB == 1526 + 757


def test_lone_ranks_of_one_depth_leave_other_terms_unknown() -> None:
    """Then channels are allowed for, and graphs are taken for what does not grow with depth."""
    halves = plan(LLAMA_7B, pp=2)
    alone = footprint((32,), 1, (1526, 638, 757))
    (first, last) = rank_bytes(Calibration(LLAMA_7B, 8192, {}, footprints=(alone,)), Cut(1), halves)
    assert (first.runtime, first.graphs) == ((757 + 768 + 1344) * MIB, 638 * MIB)
    assert last.activations == 1526 * MIB
    # In TP=2 one depth: graphs grow as they do in TP=1, by 10 of 420 MiB a layer.
    others = (footprint((16, 16), 1, (1, 260, 700), (1, 260, 700)), footprint((32,), 1, (1, 420, 500)))
    known = Calibration(LLAMA_7B, 8192, {}, footprints=(*others, footprint((32,), 2, *[(1, 840, 900)] * 2)))
    halves = plan(LLAMA_7B, tp=2, pp=2)
    assert rank_bytes(known, Cut(2), halves)[0].graphs == pytest.approx(520 * MIB, abs=MIB)


def test_all_ranks_use_as_many_tokens_as_the_fullest_can_hold() -> None:
    ranks = (RankBytes(100, 0, 0, 0, 10), RankBytes(200, 0, 0, 0, 20))
    assert kv_tokens(ranks, (1000, 1000)) == 40  # 90 on the first
    assert kv_tokens(ranks, (150, 1000)) == 5
    assert kv_tokens(ranks, (1000, 50)) == 0


@given(st.integers(1, 31), st.sampled_from([1, 2, 4]))
def test_cuts_without_fingerprints_get_allowances(first: int, tp: int) -> None:
    split = plan(LLAMA_7B, tp=tp, layers_per_stage=(first, 32 - first))
    ranks = rank_bytes(CALIBRATION, Cut(tp, "fp8"), split)
    assert len(ranks) == 2 * tp
    assert all(rank.activations > 0 and rank.runtime > 0 for rank in ranks)
    assert ranks[0] == ranks[tp - 1]


@pytest.mark.parametrize("distinct", [0, 2])
def test_weights_that_the_engine_stores_in_fewer_bits_are_as_measured(distinct: int) -> None:
    """Linear layers of Llama-2-7B in one byte instead of two; norms, embedding and head as they are; 32 MiB
    once."""
    linear, norms, table = 4 * 4096**2 + 3 * 4096 * 11008, 2 * 4096, 2 * 32000 * 4096

    def weights(layers: int) -> int:
        return layers * (linear + 2 * norms) + 2 * table + 2 * 4096 + 32 * MIB

    memory = RankMemory(weights(distinct or 16), 300 * MIB, 0, 500 * MIB, 0, 0)
    seen = Footprint(Setting((16,), 1, "fp8"), (memory,), 1.0, distinct)
    known = Calibration(LLAMA_7B, 8192, {}, footprints=(*CALIBRATION.footprints, seen))
    whole = plan(LLAMA_7B)
    assert rank_bytes(known, Cut(1, "fp8"), whole)[0].weights == pytest.approx(weights(32), rel=1e-6)
    assert rank_bytes(known, Cut(1), whole)[0].weights == 32 * 2 * (linear + norms) + 2 * table + 2 * 4096
