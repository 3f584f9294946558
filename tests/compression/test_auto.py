"""The search for the smallest artefact within a loss, against trying everything."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.errors import AdapterError
from profiler.evaluation.results import Metric
from workers.compression.auto import CANDIDATES, Candidate, Chosen, LossTooLarge, Refused, Sizes, smallest
from workers.compression.choose import MethodName, Options, check
from workers.compression.quality import Loss

DENSE = 100_000


@dataclass(frozen=True)
class Made:
    """A candidate's size and losses; no losses: the method cannot code the model."""

    share: float
    code_bytes: int
    losses: tuple[float, ...]


def losses(made: Made) -> tuple[Loss, ...]:
    return tuple(
        Loss(f"task {i}", Metric.EXACT_MATCH, 1.0, 1 - loss / 100, loss, loss - 1, loss + 1, 100)
        for i, loss in enumerate(made.losses)
    )


class World:
    """Where every candidate's artefact and losses are known beforehand. `log` has what was asked for."""

    def __init__(self, made: list[Made], full_bytes: int) -> None:
        self.candidates = [
            Candidate(Options(MethodName.deltamix, ratio=(i + 1) / 64), each.share)
            for i, each in enumerate(made)
        ]
        self.made = dict(zip((c.name for c in self.candidates), made, strict=True))
        self.full_bytes = full_bytes
        self.log: list[tuple[str, str]] = []

    def compress(self, candidate: Candidate) -> Sizes:
        self.log.append(("compress", candidate.name))
        made = self.made[candidate.name]
        if not made.losses:
            raise Refused(f"{candidate.name} cannot")
        return Sizes(self.full_bytes + made.code_bytes, made.code_bytes, DENSE)

    def quality(self, candidate: Candidate) -> tuple[Loss, ...]:
        self.log.append(("quality", candidate.name))
        return losses(self.made[candidate.name])

    def search(self, max_loss: float) -> Chosen:
        return smallest(self.candidates, self.compress, self.quality, max_loss)

    def within(self, max_loss: float) -> list[int]:
        """Sizes of all that lose at most so much on every task, by trying everything."""
        sizes = (
            self.full_bytes + each.code_bytes
            for each in self.made.values()
            if each.losses and max(each.losses) <= max_loss
        )
        return sorted(sizes)


shares = st.sampled_from([1 / 32, 1 / 16, 1 / 8, 3 / 16, 1 / 4])


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Losses in any order, artefacts of at least their candidate's share, and some that cannot be made."""
    made = []
    tasks = draw(st.integers(1, 3))
    for _ in range(draw(st.integers(1, 7))):
        share = draw(shares)
        code = math.ceil(share * DENSE * draw(st.sampled_from([1.0, 1.09, 1.5, 3.0])))
        lost = draw(st.lists(st.integers(-2, 12).map(float), min_size=tasks, max_size=tasks))
        made.append(Made(share, code, tuple(lost) if draw(st.integers(0, 5)) else ()))
    return World(made, draw(st.sampled_from([0, 500, 1_000_000])))


@given(world=worlds(), max_loss=st.integers(-1, 12))
def test_the_smallest_of_all_within_the_limit_is_chosen(world: World, max_loss: int) -> None:
    within = world.within(max_loss)
    if within:
        chosen = world.search(max_loss)
        assert chosen.best.sizes is not None
        assert chosen.best.sizes.size_bytes == within[0]
        assert chosen.best.within(max_loss)
        assert chosen.best in chosen.tried
    elif all(not each.losses for each in world.made.values()):
        with pytest.raises(Refused, match=r"cannot$"):
            world.search(max_loss)
    else:
        with pytest.raises(LossTooLarge) as refusal:
            world.search(max_loss)
        assert len(refusal.value.tried) == len(world.made)


@given(world=worlds(), max_loss=st.integers(-1, 12))
def test_nothing_is_done_twice_or_without_need(world: World, max_loss: int) -> None:
    """Each is compressed once at most, in the order of least sizes, and none that cannot be smaller than what
    is within the limit already."""
    tried: tuple[str, ...]
    try:
        tried = tuple(each.candidate.name for each in world.search(max_loss).tried)
    except AdapterError as error:
        tried = tuple(each.candidate.name for each in getattr(error, "tried", ())) or tuple(world.made)
    compressed = [name for what, name in world.log if what == "compress"]
    assert len(set(compressed)) == len(compressed)
    assert sorted(compressed) == sorted(tried)
    least = [world.made[name].share for name in compressed]
    assert least == sorted(least)
    found = math.inf
    for name in compressed:
        made = world.made[name]
        assert made.share * DENSE < found
        measured = ("quality", name) in world.log
        assert measured == (bool(made.losses) and made.code_bytes < found)
        if measured and max(made.losses) <= max_loss:
            found = made.code_bytes


def test_a_limit_that_no_method_keeps_lists_each_method_s_loss() -> None:
    world = World(
        [Made(1 / 16, 6_250, (4.0, 1.0)), Made(1 / 8, 12_500, (0.0, 2.5)), Made(1 / 4, 9, ())], 1000
    )
    with pytest.raises(LossTooLarge) as refusal:
        world.search(2)
    text = str(refusal.value)
    assert "every compression loses more than 2; allow a larger loss" in text
    assert "The smallest loss has deltamix-0.03125: 0.0135 MB, loses task 1: 2.50 points" in text
    assert "deltamix-0.015625: 0.00725 MB, loses task 0: 4.00 points (3.00 to 5.00)" in text
    assert "deltamix-0.046875 cannot" in text


def test_the_candidates_are_methods_options_from_small_to_large() -> None:
    """Their least sizes, by the formats: 2:4 has two values of four and their places, the SVD most of its
    ratio."""
    for candidate in CANDIDATES:
        check(candidate.options)
        bits, ratio = candidate.options.bits, candidate.options.ratio
        if bits is None:
            assert ratio is not None
            assert 0.8 * ratio <= candidate.least_share <= ratio
        else:
            assert candidate.least_share == (2 * bits + 4) / 4 / 16  # of four columns of 16 bits
    names = [candidate.name for candidate in CANDIDATES]
    assert len(set(names)) == len(names)
    assert [c.least_share for c in CANDIDATES] == sorted(c.least_share for c in CANDIDATES)
