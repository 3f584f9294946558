"""A rank's budget: how it reaches the rank, and what is said when the device has less."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from testkit.engine_configs import echo_config
from workers.agent.reports import DeviceSample, ProcessMemory
from workers.group.launch import Launch, LaunchError, reports_of
from workers.group.memory_check import refusal, shortage
from workers.group.plan import VARIABLE, from_environment, plan_of
from workers.messages import RankConfig

GIB = 2**30
RANK = RankConfig(10, 5 * GIB, GIB, 0, "a", "nvidia-h200", 3)


def gpu(used: int, *processes: ProcessMemory) -> DeviceSample:
    return DeviceSample(3, "nvidia-h200", 16 * GIB, used, (), processes)


def test_a_plan_reaches_the_ranks_as_it_was(tmp_path: Path) -> None:
    config = replace(echo_config(), ranks=(RANK, replace(RANK, device_index=1, layers=20)))
    plan = plan_of(config, tmp_path)
    assert from_environment(plan.as_environment()) == plan
    assert plan.ranks == config.ranks
    assert from_environment({}) is None
    assert from_environment({VARIABLE: ""}) is None


def test_the_missing_memory_is_the_plan_less_free_and_held_memory() -> None:
    assert shortage(RANK, gpu(11 * GIB)) == 0
    assert shortage(RANK, gpu(11 * GIB + 1)) == 1
    assert shortage(RANK, gpu(12 * GIB), own_bytes=GIB) == 0


def test_the_refusal_names_planned_and_found_memory_and_its_holders() -> None:
    others = (
        ProcessMemory(11, 2 * GIB, ""),
        ProcessMemory(12, 9 * GIB, "llama"),
        ProcessMemory(13, GIB, None),
    )
    said = refusal(1, RANK, gpu(13 * GIB, *others))
    assert said == (
        "rank 1 needs 5.00 GiB on nvidia-h200 3 of a, but only 3.00 of 16.00 GiB are free; in use: "
        "9.00 GiB by process 12 of the engine of 'llama', 2.00 GiB by process 11, which is not an engine of "
        "this cluster, 1.00 GiB by process 13, which is not an engine of this cluster, "
        "1.00 GiB by processes that are not visible here"
    )


def test_memory_without_a_known_holder_is_reported_as_such() -> None:
    assert refusal(0, RANK, gpu(15 * GIB)).endswith("15.00 GiB by processes that are not visible here")


def test_reports_are_shown_with_the_plan_in_rank_order() -> None:
    config = replace(echo_config(2), ranks=(RANK, replace(RANK, device_index=1)))
    measured = {"pid": 7, "weights_bytes": 1, "kv_cache_bytes": 2, "process_bytes": 3, "total_bytes": 4}
    reports = reports_of(config, [{"rank": 1, **measured}, {"rank": 0, **measured}])
    assert [(r.rank, r.device_index, r.planned_bytes, r.total_bytes) for r in reports] == [
        (0, 3, 5 * GIB, 4),
        (1, 1, 5 * GIB, 4),
    ]


def test_ranks_learn_where_they_may_read(tmp_path: Path) -> None:
    plan = plan_of(replace(echo_config(), roots=("/models", "/more")), tmp_path)
    found = from_environment(plan.as_environment())
    assert found is not None
    assert found.roots == ("/models", "/more")


def test_a_model_with_a_link_out_of_its_folder_is_not_started(tmp_path: Path) -> None:
    """vLLM opens its files by their paths: what registration looked at may have been exchanged since."""
    (tmp_path / "root/model").mkdir(parents=True)
    (tmp_path / "secret").write_text("s3cret")
    (tmp_path / "root/model/model.safetensors").symlink_to(tmp_path / "secret")
    config = replace(echo_config(), model_path=str(tmp_path / "root/model"), roots=(str(tmp_path / "root"),))
    with pytest.raises(LaunchError, match=r"model\.safetensors links to a file outside"):
        Launch(config).begin()
