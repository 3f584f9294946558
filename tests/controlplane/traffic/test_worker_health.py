"""Which workers get requests, by what was seen of each: silence, failures, and the way back."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.traffic.worker_health import (
    HealthRules,
    Seen,
    Standing,
    Takes,
    answered,
    asked,
    erred,
    failed,
    is_doubtful,
    is_silent,
    looked,
    reported,
    standing,
    takes,
)

RULES = HealthRules(quiet=6, failures=5, rest=10)
REPORTED = reported(Seen())


def after_looks(seen: Seen, count: int) -> Seen:
    for _ in range(count):
        seen = looked(seen, RULES)
    return seen


def after_failures(seen: Seen, count: int) -> Seen:
    for _ in range(count):
        seen = failed(seen, RULES)
    return seen


def test_a_worker_that_never_reported_its_load_is_never_silent() -> None:
    assert standing(after_looks(Seen(), 1000), RULES) is Standing.WELL


def test_a_worker_that_reported_counts_as_ill_after_n_silent_looks_and_not_before() -> None:
    assert standing(after_looks(REPORTED, 5), RULES) is Standing.WELL
    assert standing(after_looks(REPORTED, 6), RULES) is Standing.ILL


def test_a_worker_that_reports_again_is_on_trial_until_it_answers() -> None:
    back = reported(after_looks(REPORTED, 7))
    assert standing(back, RULES) is Standing.ON_TRIAL
    assert standing(looked(back, RULES), RULES) is Standing.ON_TRIAL
    assert standing(answered(back), RULES) is Standing.WELL


def test_failures_in_a_row_are_counted_and_an_answer_ends_the_row() -> None:
    assert standing(after_failures(REPORTED, 4), RULES) is Standing.WELL
    assert standing(after_failures(answered(after_failures(REPORTED, 4)), 4), RULES) is Standing.WELL
    assert standing(after_failures(REPORTED, 5), RULES) is Standing.ILL


def test_a_failed_worker_rests_longer_after_every_failure_of_its_trial() -> None:
    seen, rests = after_failures(Seen(), 5), []
    for _ in range(10):
        rest = 0
        while standing(seen, RULES) is Standing.ILL:
            seen, rest = looked(seen, RULES), rest + 1
        assert standing(seen, RULES) is Standing.ON_TRIAL
        rests.append(rest)
        seen = failed(seen, RULES)
    assert rests == [10, 20, 30, 40, 50, 60, 70, 80, 80, 80]


def test_error_answers_only_raise_a_doubt_about_the_worker() -> None:
    seen = REPORTED
    for _ in range(4):
        seen = erred(seen)
    assert not is_doubtful(seen, RULES)
    for _ in range(100):
        seen = erred(seen)
        assert is_doubtful(seen, RULES)
        assert standing(seen, RULES) is Standing.WELL
    assert not is_doubtful(answered(seen), RULES)


def test_a_probe_decides_about_a_doubtful_worker() -> None:
    doubted = REPORTED
    for _ in range(5):
        doubted = erred(doubted)
    well, ill = asked(doubted, RULES, is_well=True), asked(doubted, RULES, is_well=False)
    assert (standing(well, RULES), is_doubtful(well, RULES)) == (Standing.WELL, False)
    assert (standing(ill, RULES), is_doubtful(ill, RULES)) == (Standing.ILL, False)
    tried = after_looks(ill, RULES.rest)
    tried = reported(tried)
    assert standing(tried, RULES) is Standing.ON_TRIAL
    assert is_doubtful(erred(tried), RULES)  # one is enough, for it has one at a time
    again = asked(erred(tried), RULES, is_well=False)
    assert standing(reported(after_looks(again, 2 * RULES.rest - 1)), RULES) is Standing.ILL
    assert standing(reported(after_looks(again, 2 * RULES.rest)), RULES) is Standing.ON_TRIAL


def test_each_state_of_a_worker_has_what_it_takes() -> None:
    """All clusters of up to four workers are tried."""
    for count in range(5):
        for standings in product(Standing, repeat=count):
            found = takes(standings)
            assert len(found) == count
            if Standing.WELL in standings:
                well = {Standing.WELL: Takes.ALL, Standing.ON_TRIAL: Takes.ONE, Standing.ILL: Takes.NONE}
                assert found == [well[each] for each in standings]
            elif count:
                assert Takes.ALL in found
                assert Takes.ONE not in found
                tried = Standing.ON_TRIAL in standings
                assert all(
                    (each is Takes.NONE) == (tried and was is Standing.ILL)
                    for each, was in zip(found, standings, strict=True)
                )


EVENTS = st.lists(
    st.sampled_from(
        [
            *(reported, answered, erred, lambda s: failed(s, RULES), lambda s: looked(s, RULES)),
            *(lambda s: asked(s, RULES, True), lambda s: asked(s, RULES, False)),
        ]
    )
)


@given(EVENTS)
@settings(max_examples=2 * settings().max_examples)
def test_a_worker_that_reports_its_load_always_comes_back(events: list) -> None:  # type: ignore[type-arg]
    seen = Seen()
    for event in events:
        seen = event(seen)
    for _ in range(RULES.rest * RULES.most_rests):
        seen = reported(looked(seen, RULES))
    assert standing(seen, RULES) is not Standing.ILL
    assert standing(answered(seen), RULES) is Standing.WELL
    assert is_silent(after_looks(replace(seen, quiet=0), RULES.quiet), RULES)
