"""Requests of scenarios: rates, lengths, popularity and its drift, recorded traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controlplane.simulation import reading, traces, traffic
from controlplane.simulation.experiment import Case, Experiment
from controlplane.simulation.forms import LengthsForm, ScenarioForm
from placement.solver.schema import ScenarioError
from testkit.simulation import scenarios

RNG = np.random.default_rng


def form_of(**changes: Any) -> ScenarioForm:
    document = scenarios.small()
    for path, value in changes.items():
        section, _, name = path.partition("__")
        document[section][name] = value
    document["horizonS"] = 400
    return reading.form_of(document)


@pytest.mark.parametrize(("arrivals", "cv"), [("poisson", 1.0), ("gamma", 0.5), ("gamma", 3.0)])
def test_gaps_have_the_rate_and_the_variation(arrivals: str, cv: float) -> None:
    form = form_of(traffic__arrivals=arrivals, traffic__cv=cv)
    asked = traffic.requests(form, None, 50.0, 1).asked
    gaps = np.diff(asked.arrival_s)
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 50, rel=4 * cv / len(gaps) ** 0.5)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)


def test_a_seed_gives_the_same_requests_and_another_gives_others() -> None:
    form = form_of()
    one, same, other = (traffic.requests(form, None, 20.0, seed) for seed in (1, 1, 2))
    assert (one.asked == same.asked).all()
    assert (one.classes == same.classes).all()
    assert len(one.asked) != len(other.asked)


@pytest.mark.parametrize(
    ("form", "mean"),
    [
        (LengthsForm(kind="fixed", mean=70), 70),
        (LengthsForm(kind="uniform", least=10, most=90), 50),
        (LengthsForm(kind="geometric", mean=50, most=4000), 50),
        (LengthsForm(kind="lognormal", mean=200, cv=0.8, most=4000), 200),
    ],
)
def test_lengths_have_their_mean_and_bounds(form: LengthsForm, mean: float) -> None:
    drawn = traffic.draw(form, 40_000, RNG(3))
    assert drawn.mean() == pytest.approx(mean, rel=0.02)
    assert drawn.min() >= form.least
    assert drawn.max() <= form.most


def test_popularity_is_zipfs() -> None:
    form = form_of(popularity__drift=None, popularity__exponent=1.2)
    asked = traffic.popular(form, np.zeros(100_000), RNG(1))
    counts = np.sort(np.bincount(asked, minlength=form.variant_count))[::-1]
    weights = np.arange(1, form.variant_count + 1) ** -1.2
    assert counts / counts.sum() == pytest.approx(weights / weights.sum(), abs=0.006)


def test_popularity_drifts_from_period_to_period() -> None:
    form = form_of(popularity__drift={"periodS": 10, "share": 1.0}, popularity__exponent=2.0)
    hottest = []
    for epoch in range(20):
        arrivals = np.repeat(10.0 * np.arange(epoch + 1), 2000)
        asked = traffic.popular(form, arrivals, RNG(5))[-2000:]
        halves = [np.bincount(half, minlength=10).argmax() for half in (asked[:1000], asked[1000:])]
        assert halves[0] == halves[1]
        hottest.append(int(halves[0]))
    assert len(set(hottest)) > 3


def test_the_bases_share_and_the_classes_are_drawn() -> None:
    made = traffic.requests(form_of(), None, 60.0, 1)
    assert (made.asked.variant == 0).mean() == pytest.approx(0.2, abs=0.02)
    shares = np.bincount(made.classes) / len(made.classes)
    assert shares == pytest.approx([2 / 3.5, 1 / 3.5, 0.5 / 3.5], abs=0.02)
    terms = made.terms()
    for i in range(50):
        number = made.classes[i]
        assert terms(i).ttft_s == (0.4, 2.0, None)[number]
        assert terms(i).tenant.max_waiting == (6, None, None)[number]
        assert made.asked.ttft_s[i] == (0.4, 2.0, np.inf)[number]


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:59.5000000,374,44
2023-11-17 00:00:01.0000000,396,109
2023-11-17 00:00:00.2500000,12,0
"""


def test_azure_s_traces_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    trace = traces.read(path)
    assert trace.arrival_s == pytest.approx([0, 0.75, 1.5])
    assert trace.prompt.tolist() == [374, 12, 396]
    assert trace.output.tolist() == [44, 1, 109]
    assert trace.models is None
    assert trace.rate_per_s == pytest.approx(2 / 1.5)


def lines(*entries: dict[str, Any]) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def test_deltazip_s_traces_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    some = {"prompt": "x" * 40, "max_tokens": 7}
    path.write_text(
        lines(
            {"timestamp": 1.5, "model": "delta-10", **some},
            {"timestamp": 2.0, "model": "delta-9", **some},
            {"timestamp": 4.0, "model": "delta-10", **some, "prompt": "é"},
        )
    )
    trace = traces.read(path)
    assert trace.arrival_s == pytest.approx([0, 0.5, 2.5])
    assert trace.prompt.tolist() == [10, 10, 1]
    assert trace.output.tolist() == [7, 7, 7]
    assert trace.models is not None
    assert trace.models.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "TIME,TOKENS\n1,2\n", "expected the header TIMESTAMP"),
        ("a.csv", AZURE + "yesterday,1,2\n", "line 5: "),
        ("a.csv", AZURE + "2023-11-17 00:00:01,1\n", "line 5: "),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "expected requests"),
        ("a.jsonl", lines({"timestamp": 1, "prompt": "a"}), "line 1: expected an object with timestamp"),
        ("a.jsonl", "[1]\n", "line 1: "),
        ("a.jsonl", "{\n", "line 1: "),
    ],
)
def test_a_trace_that_is_none_is_refused(tmp_path: Path, name: str, text: str, said: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ScenarioError, match=r"traffic\.file: ") as raised:
        traces.read(path)
    assert said in str(raised.value)


def test_a_trace_that_is_absent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"traffic\.file: .* is not a valid trace"):
        traces.read(tmp_path / "none.csv")


def traced(tmp_path: Path, **traffic_of: Any) -> ScenarioForm:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    document = scenarios.changed("traffic", {"arrivals": "trace", "file": "trace.csv", **traffic_of})
    return reading.form_of(document)


def test_a_trace_is_stretched_to_a_rate_and_repeated(tmp_path: Path) -> None:
    form = traced(tmp_path, ratePerS=4, repeat=True)
    trace = traces.read(tmp_path / "trace.csv")
    asked = traffic.requests(form, trace, 4.0, 1).asked
    assert len(asked) == 4 * form.horizon_s
    assert asked.arrival_s[:4] == pytest.approx([0, 0.25, 0.5, 0.75])
    assert asked.prompt[:4].tolist() == [374, 12, 396, 374]
    as_recorded = traffic.requests(traced(tmp_path), trace, None, 1).asked
    assert as_recorded.arrival_s == pytest.approx([0, 0.75, 1.5])


def test_a_scenario_runs_by_a_trace(tmp_path: Path) -> None:
    form = traced(tmp_path)
    measured = Experiment(form, tmp_path).run(Case("most-idle", None, 0, (2,)))
    assert measured["requests"] == 1  # two of three came in the warm-up
    assert measured["answered"] == 1


def test_a_trace_must_not_name_more_variants_than_there_are(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    entries = [{"timestamp": n / 10, "model": f"m{n}", "prompt": "a", "max_tokens": 1} for n in range(11)]
    path.write_text(lines(*entries))
    with pytest.raises(ScenarioError, match="variants: the trace names 11"):
        traffic.requests(traced(tmp_path), traces.read(path), None, 1)
