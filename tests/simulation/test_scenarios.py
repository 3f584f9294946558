"""Whole scenarios: what is refused by which name, what each request becomes, the same bytes for a seed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controlplane.simulation import figures, reading
from controlplane.simulation.experiment import Case, Experiment
from controlplane.simulation.forms import ScenarioForm
from controlplane.simulation.simulate import simulate
from controlplane.simulation.world import DONE, DROPPED, NO_REASON, REFUSED
from placement.solver.schema import ScenarioError
from testkit.known_models import LLAMA_7B_CONFIG
from testkit.simulation import scenarios

EXAMPLE = Path(__file__).parents[2] / "docs/examples/simulation.yaml"
HERE = Path(__file__).parent


def outcome_of(document: dict[str, Any]) -> dict[str, Any]:
    return simulate(reading.form_of(document), HERE)


@pytest.fixture(scope="module")
def ran() -> dict[str, Any]:
    return outcome_of(scenarios.small())


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("cluster.groups.0.count", 0, "cluster.groups.0.count: "),
        ("cluster.groups.0.kvTokens", "many", "cluster.groups.0.kvTokens: "),
        ("cluster.groups.0.steps", None, "cluster.groups.0: expected either steps or estimate"),
        ("cluster.groups.0.steps.baseMs", True, "cluster.groups.0.steps.baseMs: expected a number, got true"),
        ("cluster.groups.0.wheels", 4, "cluster.groups.0.wheels: "),
        ("cluster.groups", [], "cluster.groups: "),
        ("variants.0.kind", "bofft", "variants.0.kind: "),
        ("variants.0.ranks", {"1024": 1}, "variants.0.ranks.1024"),
        ("variants.0.ranks", [8, 64, 8], "variants.0: ranks: 8 is named twice"),
        ("traffic.arrivals", "trace", "traffic: expected file"),
        ("traffic.arrivals", "often", "traffic.arrivals: "),
        ("traffic.rates", [1, 2], "traffic: expected either ratePerS or rates"),
        ("traffic.promptTokens", None, "traffic: expected promptTokens"),
        ("traffic.promptTokens.least", 500, "traffic.promptTokens: expected least <= most"),
        ("traffic.ratePerS", 1e9, "expected at most 20000000 requests"),
        ("classes.1.name", "chat", "classes: chat is named twice"),
        ("classes.0.priority", "urgent", "classes.0.priority: "),
        ("warmUpS", 7, "expected warmUpS below horizonS, got 7"),
        ("policies", ["fastest"], "policies: expected any of least-harm"),
        ("popularity.drift.periodS", 0, "popularity.drift.periodS: "),
        ("engine.hostGib", -1, "engine.hostGib: "),
    ],
)
def test_wrong_fields_are_named(path: str, value: Any, said: str) -> None:
    with pytest.raises(ScenarioError) as raised:
        reading.form_of(scenarios.changed(path, value))
    assert said in str(raised.value)


def test_requests_longer_than_the_kv_cache_are_refused() -> None:
    with pytest.raises(ScenarioError, match=r"cluster\.groups\.kvTokens: expected"):
        outcome_of(scenarios.changed("cluster.groups.0.kvTokens", 100))


def test_a_document_that_is_no_map_is_refused() -> None:
    with pytest.raises(ScenarioError, match="expected an object with cluster, traffic"):
        reading.form_of([1, 2])


def test_the_example_is_read() -> None:
    form = reading.read(EXAMPLE)
    assert form.cluster.count == 8
    assert form.variant_count == 204
    assert reading.read(EXAMPLE, ["random"], 7).policies == ("random",)


def test_the_example_runs_for_a_moment() -> None:
    form = reading.read(EXAMPLE).model_copy(update={"horizon_s": 3.0, "warm_up_s": 0.5, "seeds": 1})
    results = simulate(form, EXAMPLE.parent)["results"]
    assert [(result["policy"], result["ratePerS"]) for result in results] == [
        (policy, rate) for rate in (20, 40, 60, 80) for policy in ("least-harm", "most-idle")
    ]
    assert all(result["requests"]["mean"] > 0 for result in results)


@pytest.mark.parametrize("policy", ["least-harm", "most-idle"])
def test_every_request_ends_in_one_state(policy: str) -> None:
    document = scenarios.changed("gateway", {"maxOngoing": 6, "places": 50, "refuse": False})
    experiment = Experiment(reading.form_of(document), HERE)
    world, measured = experiment.watched(Case(policy, 60.0, 3, experiment.counts))
    state, reason = world.outcomes.state, world.outcomes.reason
    assert set(np.unique(state)) == {DONE, REFUSED, DROPPED}
    assert ((state == DONE) == (reason == NO_REASON)).all()
    done = state == DONE
    assert (world.outcomes.group[done] >= 0).all()
    assert (world.outcomes.group[~done] == -1).all()
    assert (world.asked.arrival_s <= world.outcomes.sent_s)[done].all()
    assert (world.outcomes.sent_s <= world.outcomes.first_s)[done].all()
    assert (world.outcomes.first_s <= world.outcomes.end_s)[done].all()
    assert measured["requests"] == measured["answered"] + sum(measured["refused"].values())
    assert world.engines.tokens.sum() == world.asked.output[done].sum()
    engines = world.engines
    assert (engines.running == 0).all()
    assert (engines.waiting == 0).all()
    assert (engines.batch.rows == 0).all()
    assert (world.seen.groups.batch.rows == 0).all()
    assert (world.seen.held.rows == 0).all()


def test_attainment_is_of_all_that_came(ran: dict[str, Any]) -> None:
    """The figures computed again from each request's outcome."""
    form = reading.form_of(scenarios.small())
    experiment = Experiment(form, HERE)
    shares = []
    for seed in range(form.seeds):
        world, _ = experiment.watched(Case("least-harm", 30.0, seed, experiment.counts))
        kept = 0
        counted = [i for i in range(len(world.asked)) if world.asked.arrival_s[i] >= 1.0]
        for i in counted:
            asked, outcome = world.asked[i], world.outcomes[i]
            tpot_s = (outcome.end_s - outcome.first_s) / max(1, asked.output - 1)
            in_time = outcome.first_s - asked.arrival_s <= asked.ttft_s and tpot_s <= asked.tpot_s
            kept += bool(outcome.state == DONE and in_time)
        shares.append(kept / len(counted))
    (result,) = ran["results"]
    assert result["attainment"]["all"]["mean"] == pytest.approx(sum(shares) / len(shares))
    assert 0.05 < sum(shares) / len(shares) < 0.95


def test_the_same_seed_gives_the_same_bytes(ran: dict[str, Any]) -> None:
    again = json.dumps(outcome_of(scenarios.small()))
    assert again == json.dumps(ran)
    assert again != json.dumps(outcome_of(scenarios.changed("seeds", 3)))


def test_all_figures_are_numbers(ran: dict[str, Any]) -> None:
    def check(value: Any) -> None:
        if isinstance(value, dict):
            for entry in value.values():
                check(entry)
        elif isinstance(value, float):
            assert math.isfinite(value)

    check(ran)
    json.dumps(ran, allow_nan=False)
    (result,) = ran["results"]
    assert set(result["attainment"]["classes"]) == {"chat", "batch", "rest"}
    assert set(result["attainment"]["kinds"]) == {"base", "lora", "boft"}
    assert 0 < result["utilisation"]["mean"] <= 1
    assert result["groupHours"]["mean"] == pytest.approx(2 * 5 / 3600)
    assert result["loads"]["mean"] > 0


def test_admitted_requests_at_twice_the_capacity_meet_their_targets() -> None:
    """In virtual time, by the gateway's own admission: few of those admitted are late, the engines stay busy,
    and most of the highest priority are admitted."""
    (result,) = outcome_of(scenarios.overloaded())["results"]
    assert result["requests"]["mean"] > 1.8 * result["answered"]["mean"]
    assert result["utilisation"]["mean"] > 0.99
    kept = {name: share["mean"] for name, share in result["attainment"]["ofAdmitted"].items()}
    assert kept["high"] > 0.95
    assert kept["normal"] > 0.95
    assert result["attainment"]["classes"]["high"]["mean"] > 0.8


def test_sizing_finds_the_groups_that_keep_a_target() -> None:
    document = scenarios.changed("classes", [{"ttftMs": 1000, "tpotMs": 80}])
    (size,) = simulate(reading.form_of(document), HERE, 0.95)["sizes"]
    assert size["attainment"]["mean"] >= 0.95
    assert size["withOneLess"]["mean"] < 0.95
    one_more = scenarios.changed("classes", [{"ttftMs": 1000, "tpotMs": 80}])
    one_more["cluster"]["groups"][0]["count"] = size["groups"]
    (result,) = outcome_of(one_more)["results"]
    assert result["attainment"]["all"] == size["attainment"]


def test_variants_without_a_size_lose_no_request() -> None:
    """Variants are there as soon as they are requested, so each request is served like a request for the
    base."""
    document = scenarios.changed("variants", [{"kind": "lora", "count": 20, "ranks": [8]}])
    document["engine"] = {}
    document["traffic"]["ratePerS"] = 2
    (result,) = outcome_of(document)["results"]
    (base,) = outcome_of({**document, "popularity": {"baseShare": 1}})["results"]
    assert result["answered"] == result["requests"]
    assert result["ttftS"]["p99"]["mean"] == pytest.approx(base["ttftS"]["p99"]["mean"], rel=0.1)


def test_the_order_of_ranks_in_the_file_changes_nothing() -> None:
    one, other = (
        outcome_of(scenarios.changed("variants.0.ranks", ranks))
        for ranks in ({8: 6, 16: 1, 64: 2}, {64: 2, 8: 6, 16: 1})
    )
    assert one == other
    listed = [outcome_of(scenarios.changed("variants.0.ranks", ranks)) for ranks in ([64, 8], [8, 64])]
    assert listed[0] == listed[1]


TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def of_trace(folder: Path, lines: Sequence[str], **changes: Any) -> ScenarioForm:
    (folder / "trace.csv").write_text(TRACE + "".join(line + "\n" for line in lines))
    document = scenarios.changed("traffic", {"arrivals": "trace", "file": "trace.csv"})
    return reading.form_of({**document, **changes})


def test_a_trace_that_ends_before_the_warm_up_has_no_size(tmp_path: Path) -> None:
    form = of_trace(tmp_path, ["2026-01-01 00:00:00,100,5", "2026-01-01 00:00:02,100,5"], warmUpS=3)
    with pytest.raises(ScenarioError, match=r"warmUpS: no requests arrive after warmUpS \(3 s\)"):
        simulate(form, tmp_path, 0.9)
    (result,) = simulate(form, tmp_path)["results"]
    assert (result["requests"]["mean"], result["attainment"]["all"]) == (0, None)


def test_a_repeated_trace_is_bounded(tmp_path: Path) -> None:
    lines = [f"2026-01-01 00:00:00.00{n},9,3" for n in range(3)]
    form = of_trace(tmp_path, lines, horizonS=1e7)
    form = form.model_copy(update={"traffic": form.traffic.model_copy(update={"repeat": True})})
    said = (
        r"traffic\.repeat: expected at most 20000000 requests until horizonS, got 1e\+10: the trace is 0\.003"
    )
    with pytest.raises(ScenarioError, match=said):
        simulate(form, tmp_path)


def test_several_kinds_of_groups_have_no_one_size() -> None:
    document = scenarios.small()
    document["cluster"]["groups"] *= 2
    with pytest.raises(ScenarioError, match="exactly one entry"):
        simulate(reading.form_of(document), HERE, 0.9)


def test_several_kinds_of_groups_are_simulated() -> None:
    document = scenarios.small()
    fast = json.loads(json.dumps(document["cluster"]["groups"][0]))
    fast["steps"]["baseMs"] = 5
    fast["maxRows"] = 8
    document["cluster"]["groups"].append(fast)
    (result,) = outcome_of(document)["results"]
    assert result["groups"] == 4
    (slower,) = outcome_of(scenarios.changed("cluster.groups.0.count", 4))["results"]
    assert result["tpotS"]["mean"]["mean"] < slower["tpotS"]["mean"]["mean"]


def estimated(tmp_path: Path, gpu: str, tp: int = 1) -> ScenarioForm:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_7B_CONFIG))
    document = scenarios.small()
    groups = document["cluster"]["groups"][0]
    del groups["steps"]
    groups["estimate"] = {"config": "config.json", "gpu": gpu, "tensorParallel": tp}
    return reading.form_of(document)


def test_steps_are_estimated_from_a_config(tmp_path: Path) -> None:
    """A step reads the weights once: 2 bytes of 6.74e9 parameters but the embedding (131e6), at 3.35 TB/s."""
    (groups,) = estimated(tmp_path, "H100").cluster.groups
    model = figures.model_of(groups, tmp_path)[0]
    assert model.decode_s[1] == pytest.approx(2 * (6.74e9 - 131e6) / 3.35e12, rel=0.03)
    assert (model.max_rows, model.kv_tokens, model.batched_tokens) == (4, 1000, 256)
    (halved,) = estimated(tmp_path, "H100", tp=2).cluster.groups
    assert figures.model_of(halved, tmp_path)[0].decode_s[1] < 0.8 * model.decode_s[1]


def test_a_variant_is_read_once_a_step_where_steps_are_estimated(tmp_path: Path) -> None:
    form = estimated(tmp_path, "A10")
    ranks = figures.draw_ranks(form.variants, np.random.default_rng(1))
    variants = figures.variants_of(form.variants, form.cluster.groups[0], ranks)
    assert variants.variant_s[1:9] == pytest.approx(0.25 * 2**20 * ranks[1:9] / 600e9)
    assert variants.variant_s[9:] == pytest.approx([1e-3] * 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gpu": "abacus"}, r"estimate\.gpu: expected one of A10"),
        (
            {"gpu": "A100-80GB", "quantization": "fp8"},
            r"estimate\.quantization: fp8 needs GPUs of compute capability 8\.9 or higher, but A100-80GB",
        ),
        ({"tensorParallel": 7}, r"cluster\.groups\.estimate: "),
        ({"config": "none"}, r"cluster\.groups\.estimate: "),
        ({"pipelineParallel": 40}, r"cluster\.groups\.estimate: "),
    ],
)
def test_an_inestimable_scenario_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    form = estimated(tmp_path, "H100")
    document = form.model_dump(by_alias=True, mode="json", exclude_none=True)
    document["cluster"]["groups"][0]["estimate"] |= change
    with pytest.raises(ScenarioError, match=said):
        simulate(reading.form_of(document), tmp_path)
