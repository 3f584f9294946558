"""status NAME, tune, prefetch: what people see."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.cli import variants
from controlplane.client import variant_limit_profile
from controlplane.client.client import Client
from controlplane.client.variant_limit_profile import Burst, Profile
from profiler.variant_limit import SlotMeasurement
from testkit.client.command_line import Cli
from testkit.client.fake_api import FakeApi, answer, deployment, error, residency


def row(out: str, start: str) -> list[str]:
    return next(line.split() for line in out.splitlines() if line.startswith(start))


@pytest.mark.parametrize("argv", [["status", "smol"], ["describe", "smol"]], ids=" ".join)
def test_the_residency_of_variants_is_shown(argv: list[str], cli: Cli) -> None:
    out = cli(*argv).out
    both = "rank 0: {0} MiB, rank 1: {0} MiB"
    assert " ".join(row(out, "v1")) == f"v1 device 0 {both.format(2.0)} {both.format(3.0)}"
    assert row(out, "v2")[:4] == ["v2", "host", "-", "-"]
    assert "not in a slot [yet]" in out
    assert "4 slots, up to 2 variants at once; 7 requests blocked, 5 overtook others, 6 preempted" in out


def test_status_of_one_as_json(cli: Cli) -> None:
    found = cli("status", "smol", "--json").json
    assert found["deployment"]["residency"][0]["variants"][0]["model"] == "v1"


def test_residency_is_unknown_while_the_engine_is_away(cli: Cli, api: FakeApi) -> None:
    api.script("GET /deployments/smol", answer(deployment(residencyReason="the engine starts")))
    assert "are unknown: the engine starts" in cli("status", "smol").out


def test_a_base_without_variants_is_reported(cli: Cli, api: FakeApi) -> None:
    api.script("GET /deployments/smol", answer(deployment(residency=residency())))
    assert "no variants are deployed on this engine" in cli("status", "smol").out


def test_tune_sets_the_variant_limit(cli: Cli, api: FakeApi) -> None:
    ended = cli("tune", "smol", "--max-active-variants", "2")
    assert "'smol' runs up to 2 variants at once" in ended.out
    assert api.calls("PATCH /deployments/smol")[0][0] == {"maxActiveVariants": 2}


def test_tune_sets_targets(cli: Cli, api: FakeApi) -> None:
    api.script("PATCH /deployments/v1", answer(deployment("v1", targets={"ttft_ms": 250, "late": "drop"})))
    ended = cli("tune", "v1", "--target-ttft-ms", "250", "--deadline-ms", "0", "--late", "drop")
    assert api.calls("PATCH /deployments/v1")[0][0] == {
        "targets": {"ttft_ms": 250.0, "deadline_ms": None, "late": "drop"}
    }
    assert ended.out == "targets of requests to 'v1': ttft_ms 250, late drop\n"


def test_tune_finds_the_limit_by_a_profile(cli: Cli, api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(client: Client, name: str, burst: Burst, limit_s: float | None, tell: object) -> Profile:
        asked.append((name, burst, limit_s))
        return Profile((SlotMeasurement(1, 50.04, 0.2, 9), SlotMeasurement(2, 80.0, 0.1234, 7)), 2)

    monkeypatch.setattr(variant_limit_profile, "run", run)
    argv = ("tune", "smol", "--profile", "--seconds", "2", "--concurrency", "4", "--ttft-ms", "500")
    api.script("GET /deployments/smol", answer(deployment(maxActiveVariants=2)))
    ended = cli(*argv)
    assert row(ended.out, "1 ") == ["1", "50.0", "200", "ms", "9"]
    assert row(ended.out, "2 ") == ["2", "80.0", "123", "ms", "7", "chosen"]
    assert asked == [("smol", Burst(2.0, 4), 0.5)]
    assert cli(*argv, "--json").json["measurements"][1] == {
        "maxActiveVariants": 2,
        "tokensPerSecond": 80.0,
        "ttftMs": 123.4,
        "requests": 7,
    }


@pytest.mark.parametrize(
    "options", [[], ["--profile", "--max-active-variants", "2"]], ids=["neither", "both"]
)
def test_tune_needs_one_way(options: list[str], cli: Cli, api: FakeApi) -> None:
    ended = cli("tune", "smol", *options)
    assert ended.code == 2
    assert "expected one kind of change in each command: --profile" in ended.err
    assert not api.asked


def test_prefetch_reads_variants_into_memory(cli: Cli, api: FakeApi) -> None:
    assert cli("prefetch", "v1").out == "'v1' is on the device\n"
    gone = residency("v1")
    gone[0]["variants"][0]["tier"] = "disk"
    api.script("POST /deployments/v1/prefetch", answer(deployment("v1", residency=gone)))
    assert "--host-gib" in cli("prefetch", "v1").out


def test_prefetch_of_several_ends_with_the_first_error(cli: Cli, api: FakeApi) -> None:
    api.script("POST /deployments/v2/prefetch", answer(error("not_deployed", "'v2' is not; deploy it"), 404))
    ended = cli("prefetch", "v1", "v2")
    assert (ended.code, ended.err.splitlines()[-2:]) == (1, ["Error: 'v2' is not", "Hint:  deploy it"])


def with_groups(*groups: tuple[str, str] | tuple[str, str, dict[str, Any]]) -> dict[str, Any]:
    """A deployment with groups of these names, phases and other fields."""
    common = {"reason": "", "failures": 0, "retryAt": None, "plan": None, "replaces": None}
    described = [
        {**common, "name": name, "phase": phase, **(more[0] if more else {})} for name, phase, *more in groups
    ]
    return deployment(groups=described)


OLD = ("smol", "Serving")
NEW = ("smol@1", "Starting", {"replaces": "smol"})


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "LOOK_S", 0.0)


@pytest.mark.usefixtures("at_once")
def test_placing_again_waits_until_new_engines_serve(cli: Cli, api: FakeApi) -> None:
    done = with_groups(("smol", "Draining"), ("smol@1", "Serving"))
    api.script("GET /deployments/smol", answer(with_groups(OLD)), answer(with_groups(OLD, NEW)), answer(done))
    api.script("PATCH /deployments/smol", answer(with_groups(OLD, NEW)))
    ended = cli("tune", "smol", "--place-anew")
    assert (ended.code, api.calls("PATCH /deployments/smol")[0][0]) == (0, {"placeAnew": True})
    assert "'smol' is served by smol@1, with memory for the variants registered now" in ended.out
    assert ended.err.count("smol@1: Starting") == 1  # said once, however long it takes


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("added", ["smol@1", "smol@2"])
def test_placing_again_without_a_better_place_is_reported(added: str, cli: Cli, api: FakeApi) -> None:
    """The engine that stays says why. One that was added by load meanwhile, even of the same name, replaces
    none."""
    why = "smol@1 could not replace it: the engine failed: RuntimeError: out of memory; no more"
    failed = with_groups(("smol", "Serving", {"reason": why}), (added, "Serving"))
    api.script("GET /deployments/smol", answer(with_groups(OLD)), answer(failed))
    api.script("PATCH /deployments/smol", answer(with_groups(OLD, NEW)))
    ended = cli("tune", "smol", "--place-anew")
    assert ended.code == 1
    assert f"smol was not replaced and still serves: {why.replace('; ', ', ')}" in " ".join(ended.err.split())
    assert "undeploy 'smol' and deploy it again" in ended.err


@pytest.mark.usefixtures("at_once")
def test_placing_again_ends_when_scaling_removes_the_old_engine(cli: Cli, api: FakeApi) -> None:
    drained = with_groups(("smol", "Draining"), ("smol@1", "Draining", {"replaces": "smol"}))
    api.script("GET /deployments/smol", answer(with_groups(OLD)), answer(drained))
    api.script("PATCH /deployments/smol", answer(with_groups(OLD, NEW)))
    ended = cli("tune", "smol", "--place-anew")
    assert ended.code == 0
    assert "'smol' will start its next engine, with memory for the variants registered now" in ended.out
