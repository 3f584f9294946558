"""The environment of an engine's processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from workers.vllm_environment import (
    BINDING,
    START_METHOD,
    V2_RUNNER,
    cache_apart,
    environment,
    fork_ranks,
    share_cores,
    threads,
    triton_cache,
)

THREADS = "OMP_NUM_THREADS"
NAMES = ("TRITON_CACHE_DIR", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME", V2_RUNNER, BINDING, START_METHOD, THREADS)


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what a test puts there is taken away again
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def test_all_engines_of_a_node_share_one_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert triton_cache() == str(tmp_path / "home/.cache/vllm/triton")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert triton_cache() == str(tmp_path / "caches/vllm/triton")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "root"))
    assert triton_cache() == str(tmp_path / "root/triton")
    assert (tmp_path / "root/triton").is_dir()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "chosen"))
    assert triton_cache() == environment((2,))["TRITON_CACHE_DIR"] == str(tmp_path / "chosen")


def test_torch_chooses_its_cache_where_the_home_is_not_writable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "file"))
    assert triton_cache() is None


def test_code_apart_shares_what_is_known_of_classes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for _ in range(2):
        folder = Path(cache_apart("repeated-4"))
        assert folder == tmp_path / "home/.cache/vllm/repeated-4"
    (folder / "modelinfos/Llama.json").write_text("{}")  # as vLLM does, which makes its folder if need be
    assert (tmp_path / "home/.cache/vllm/modelinfos/Llama.json").exists()
    (folder.parent / "repeated-6/modelinfos").mkdir(parents=True)  # of a version that shared nothing
    assert cache_apart("repeated-6") == str(folder.parent / "repeated-6")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "file"))
    assert cache_apart("repeated-4") == str(tmp_path / "file/repeated-4")


def test_stages_on_gpus_overlap_whatever_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.vllm_environment.vllm_version", lambda: "0.32.0")
    assert V2_RUNNER not in environment((10, 22), on_gpus=True)  # has it by itself
    monkeypatch.setattr("workers.vllm_environment.vllm_version", lambda: "0.26.0")
    assert environment((10, 22), on_gpus=True)[V2_RUNNER] == "1"
    assert V2_RUNNER not in environment((32,), on_gpus=True)
    assert V2_RUNNER not in environment((10, 22))
    monkeypatch.setenv(V2_RUNNER, "0")  # an operator's choice
    assert environment((10, 22), on_gpus=True)[V2_RUNNER] == "0"


def test_ranks_that_share_a_host_share_its_cores_but_one() -> None:
    assert [threads(ranks, 8) for ranks in (1, 2, 3, 9)] == [7, 3, 2, 1]
    assert threads(1, 1) == 1


def test_threads_are_bound_only_if_the_operator_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BINDING, "0-3")
    share_cores(1)
    fork_ranks()  # a fork keeps the threads that its parent was bound to
    assert os.environ[BINDING] == "0-3"
    assert not {THREADS, START_METHOD} & set(os.environ)
    monkeypatch.delenv(BINDING)
    share_cores(1_000)
    fork_ranks()
    assert (os.environ[BINDING], os.environ[THREADS], os.environ[START_METHOD]) == ("nobind", "1", "fork")
