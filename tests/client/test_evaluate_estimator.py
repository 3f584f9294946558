"""`ostinato evaluate-estimator` on tables in files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controlplane.cli import main as cli_main
from testkit import artifact_simulator as sim

Cli = Callable[..., tuple[int, str, str]]
MODELS = ("gptj-6b", "llama-2-7b")


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("OSTINATO_URL", "http://127.0.0.1:9")  # no server is there: nothing may be asked

    def run(*argv: Any) -> tuple[int, str, str]:
        code = cli_main.run(["evaluate-estimator", *map(str, argv)])
        return code, *capfd.readouterr()

    return run


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    folder = tmp_path_factory.mktemp("tables")
    bench = sim.Bench(prompt_tokens=10)
    fingerprints, truth = folder / "fingerprints.csv", folder / "truth.csv"
    fingerprints.write_text(sim.as_csv(bench.measure(sim.fingerprints(True, (1, 2), MODELS)), True))
    rows = sim.as_csv(bench.measure(sim.full_models(bench, (1, 8), models=MODELS)))
    truth.write_text(rows + "llama-2-7b,8,1,32,int4,False,100,64,OOM,,,1,1\n")
    return "--fingerprints", fingerprints, "--truth", truth


def test_people_get_a_table(cli: Cli, tables: tuple[Any, ...]) -> None:
    code, out, err = cli(*tables)
    assert (code, err) == (0, "")
    for word in ("estimator", "ostinato", "1 (oom)", "overall", "llama-2-7b", "LATENCY MEDIAN", "int4_gptq"):
        assert word in out


@pytest.mark.parametrize(
    ("estimator", "calibration"),
    [
        ("maveriq", "none"),
        ("ostinato", "none"),
        pytest.param("ostinato", "leave-one-model-out", marks=pytest.mark.slow),
        pytest.param("maveriq", "leave-one-model-out", marks=pytest.mark.slow),
    ],
)
def test_machines_get_one_document(
    cli: Cli, tables: tuple[Any, ...], estimator: str, calibration: str
) -> None:
    code, out, err = cli(*tables, "--estimator", estimator, "--calibrate", calibration, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found.keys() == {
        "estimator", "calibration", "fingerprints", "truth", "notPredicted", "groups",
    }  # fmt: skip
    assert found["estimator"].startswith(estimator)
    assert found["calibration"] == calibration
    assert found["truth"]["failed"] == {"oom": 1}
    overall = found["groups"][0]
    assert overall["by"] == "overall"
    assert overall["rows"] == overall["predicted"] == found["truth"]["plans"]
    assert 0 < overall["latency"]["median"] < overall["latency"]["p90"]


def test_mistakes_are_explained(cli: Cli, tables: tuple[Any, ...], tmp_path: Path) -> None:
    _, fingerprints, _, truth = tables
    bad = tmp_path / "bad.csv"
    bad.write_text(truth.read_text().replace(",float16,", ",,", 1))
    code, _, err = cli("--fingerprints", fingerprints, "--truth", bad)
    assert code == 1
    for word in ("bad.csv", "line 2", "DTYPE", "docs/profiler.md"):
        assert word in err
    assert cli("--fingerprints", tmp_path / "none.csv", "--truth", truth)[0] == 1
    assert cli("--fingerprints", fingerprints)[0] == 2
    assert cli("--fingerprints", fingerprints, "--truth", truth, "--estimator", "vidur")[0] == 2
