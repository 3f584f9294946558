"""The lossless stage: it keeps what a delta holds, and compresses where loading gets faster."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from profiler.checkpoint import read_model
from profiler.errors import CheckpointError
from profiler.variants.reading import read_manifest
from profiler.variants.types import VariantLimits
from profiler.variants.verifying import read_file, verify, verify_data
from testkit.random_variants import RandomDelta, write_delta, write_tiny_base
from workers.compression.lossless import Measured, cold_read_bytes_per_s, compress_files
from workers.deltas.merge import merge
from workers.deltas.writing import SafetensorsWriter

SLOWEST, FASTEST = 1e-6, 1e12  # of storages, in MB/s
LIMITS = VariantLimits(0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="module")
def delta(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_delta(base, tmp_path_factory.mktemp("delta") / "v", RandomDelta("sparse", 1))


def contents(folder: Path, base: Path) -> dict[str, bytes]:
    manifest = read_manifest(folder, read_model(base), LIMITS)
    verify_data(manifest)
    return {file.name: bytes(read_file(folder, file)) for file in manifest.files}


def on_disk(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_slow_storage_gets_all_that_is_smaller(base: Path, delta: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(delta, tmp_path / "v")
    made = compress_files(folder, SLOWEST)
    names = {file.name for file in made.files}
    assert made.kept == {f.name for f in made.files if f.compressed_bytes < f.contents_bytes} != set()
    assert on_disk(folder).keys() == {"delta.json"} | {f"{n}.zst" if n in made.kept else n for n in names}
    assert contents(folder, base) == {name: (delta / name).read_bytes() for name in names}
    verify(folder)
    stored = sum(len(raw) for name, raw in on_disk(folder).items() if name != "delta.json")
    assert made.size_after_bytes == stored < made.size_before_bytes
    raw = json.loads((folder / "delta.json").read_text())
    assert raw["version"] == 3  # as before, for its embedding is a difference
    assert {k: v for k, v in raw.items() if k not in ("version", "files")} == {
        k: v
        for k, v in json.loads((delta / "delta.json").read_text()).items()
        if k not in ("version", "files")
    }


def test_a_delta_without_differences_becomes_one_of_version_2(base: Path, tmp_path: Path) -> None:
    folder = write_delta(base, tmp_path / "v", RandomDelta("sparse", 1, full=False))
    assert json.loads((folder / "delta.json").read_text())["version"] == 1
    assert compress_files(folder, SLOWEST).kept
    assert json.loads((folder / "delta.json").read_text())["version"] == 2
    verify(folder)


def test_a_delta_without_a_version_is_refused_before_any_work(base: Path, tmp_path: Path) -> None:
    folder = write_delta(base, tmp_path / "v", RandomDelta("sparse", 1, full=False))
    raw = json.loads((folder / "delta.json").read_text())
    del raw["version"]
    (folder / "delta.json").write_text(json.dumps(raw))
    before = on_disk(folder)
    with pytest.raises(CheckpointError, match="expected a version"):
        compress_files(folder, SLOWEST)
    assert on_disk(folder) == before


def test_a_fast_storage_leaves_the_folder_as_it_was(delta: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(delta, tmp_path / "v")
    made = compress_files(folder, FASTEST)
    assert not made.kept
    assert made.size_after_bytes == made.size_before_bytes
    assert on_disk(folder) == on_disk(delta)


def test_merging_gives_the_same_weights(base: Path, delta: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(delta, tmp_path / "v")
    compress_files(folder, SLOWEST)
    merge(base, delta, tmp_path / "plain")
    merge(base, folder, tmp_path / "compressed")
    assert on_disk(tmp_path / "plain") == on_disk(tmp_path / "compressed")


def test_the_storage_is_measured_where_its_rate_is_not_given(delta: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(delta, tmp_path / "v")
    made = compress_files(folder)
    assert made.storage_measured
    assert 0 < made.storage_bytes_per_s < math.inf
    assert made.kept == {file.name for file in made.files if file.gains(made.storage_bytes_per_s)}
    assert made.load_after_s <= made.load_before_s


@pytest.mark.parametrize("rate", [SLOWEST, FASTEST, None])
def test_a_second_run_changes_nothing_and_reports_the_same(
    delta: Path, tmp_path: Path, rate: float | None
) -> None:
    """The rate also counts for data that is compressed already; the storage's rate is that of plain reads."""
    folder = shutil.copytree(delta, tmp_path / "v")
    first, once = compress_files(folder, SLOWEST), on_disk(folder)
    again = compress_files(folder, rate)
    assert on_disk(folder) == once
    assert again.kept == first.kept
    assert (again.size_before_bytes, again.size_after_bytes) == (
        first.size_before_bytes,
        first.size_after_bytes,
    )
    assert 0 < again.storage_bytes_per_s < math.inf
    assert json.loads(json.dumps(again.facts(), allow_nan=False))["compressed_files"] == len(first.kept)


def test_a_delta_without_files_is_reported_in_json(tmp_path: Path) -> None:
    (tmp_path / "delta.json").write_text(json.dumps({"version": 1, "files": {}}))
    facts = compress_files(tmp_path).facts()
    assert json.loads(json.dumps(facts, allow_nan=False))["storage_mb_per_s"] is None


@pytest.mark.parametrize("stop_at", [0, 1, 2])
def test_a_folder_left_half_done_is_sound_and_gets_done(
    base: Path, delta: Path, tmp_path: Path, stop_at: int
) -> None:
    folder = shutil.copytree(delta, tmp_path / "v")
    calls: Iterator[int] = iter(range(100))

    def stop(share: float, what: str) -> None:
        if next(calls) == stop_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress_files(folder, SLOWEST, progress=stop)
    assert contents(folder, base) == contents(delta, base)
    compress_files(folder, SLOWEST)
    whole = shutil.copytree(delta, tmp_path / "at once")
    compress_files(whole, SLOWEST)
    assert on_disk(folder) == on_disk(whole)


@pytest.mark.parametrize("leftover", ["plain", "compressed"])
def test_files_of_a_crashed_run_are_removed(delta: Path, tmp_path: Path, leftover: str) -> None:
    """Files that delta.json does not mention: the plain files, before they were removed; or the compressed
    files, before delta.json mentioned them."""
    folder = shutil.copytree(delta, tmp_path / "v")
    compress_files(folder, SLOWEST)
    clean = on_disk(folder)
    if leftover == "plain":
        shutil.copytree(delta, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("delta.json"))
        compress_files(folder, SLOWEST)
        assert on_disk(folder) == clean
    else:
        shutil.copy(delta / "delta.json", folder)
        shutil.copytree(delta, folder, dirs_exist_ok=True)
        compress_files(folder, FASTEST)
        assert on_disk(folder) == on_disk(delta)


def test_a_damaged_file_is_named(delta: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(delta, tmp_path / "v")
    path = folder / "layer-00001.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"layer-00001\.safetensors no longer has the checksum"):
        compress_files(folder, SLOWEST)


@pytest.mark.parametrize(
    ("rate", "level", "words"),
    [(0.0, 3, "above 0"), (math.nan, 3, "above 0"), (1.0, 20, "1 to 19"), (1.0, 0, "")],
)
def test_numbers_that_do_not_do(delta: Path, rate: float, level: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        compress_files(delta, rate, level)


@given(
    values=st.lists(st.integers(0, 255), min_size=1, max_size=300),
    times=st.integers(1, 2000),
    rate=st.floats(1e-3, 1e6),
    level=st.integers(1, 19),
)
def test_any_contents_come_back(
    tmp_path_factory: pytest.TempPathFactory, values: list[int], times: int, rate: float, level: int
) -> None:
    """Any file, at any storage's rate: the form that is faster by the reported figures is kept."""
    folder = tmp_path_factory.mktemp("any") / "v"
    folder.mkdir()
    data = torch.tensor(values, dtype=torch.uint8).repeat(times)
    with SafetensorsWriter(folder / "full.safetensors", {"t": ("U8", tuple(data.shape))}) as writer:
        writer.write("t", data)
    raw = (folder / "full.safetensors").read_bytes()
    entry = {"size_bytes": writer.size_bytes, "sha256": writer.sha256}
    (folder / "delta.json").write_text(json.dumps({"version": 1, "files": {"full.safetensors": entry}}))
    made = compress_files(folder, rate, level)
    (only,) = made.files
    slow, fast = len(raw) / (rate * 1e6), only.compressed_bytes / (rate * 1e6) + only.decompress_s
    assert made.kept == ({"full.safetensors"} if fast < slow else frozenset())
    verify(folder)
    stored = folder / ("full.safetensors.zst" if made.kept else "full.safetensors")
    assert {path.name for path in folder.iterdir()} == {"delta.json", stored.name}
    assert stored.stat().st_size == made.size_after_bytes
    shutil.rmtree(folder.parent)


@given(
    contents_bytes=st.integers(1, 10**10),
    compressed_bytes=st.integers(1, 10**10),
    seconds=st.floats(1e-6, 1e3),
    factor=st.floats(0.01, 100),
)
def test_slower_storage_than_the_break_even_gains(
    contents_bytes: int, compressed_bytes: int, seconds: float, factor: float
) -> None:
    file = Measured("f", contents_bytes, compressed_bytes, seconds)
    if compressed_bytes >= contents_bytes:
        assert not file.gains(factor)
    elif abs(factor - 1) > 1e-6:
        assert file.gains(factor * (contents_bytes - compressed_bytes) / seconds) == (factor < 1)


def test_a_cold_read_is_bytes_by_time(tmp_path: Path) -> None:
    """A clock that advances by two seconds whenever a file is read."""
    for name, size in (("a", 3_000_000), ("b", 1_000_000)):
        (tmp_path / name).write_bytes(bytes(size))
    ticks = iter(range(0, 100, 2))
    assert cold_read_bytes_per_s([tmp_path / "a", tmp_path / "b"], lambda: next(ticks)) == 4_000_000 / 4
    assert cold_read_bytes_per_s([]) == math.inf
