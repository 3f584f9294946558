"""Whatever lies in a folder that a tenant names: it is Ready, or refused with a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from controlplane.controller.file_reader import FileReader
from testkit.fuzz import hostile_folders as hostile

COUNT = settings().max_examples * 10  # 400, or 200 with `make unit`; `benchmarks.fuzzing.folders` draws more
SAMPLE = 50


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> hostile.Seeds:
    return hostile.sound(tmp_path_factory.mktemp("sound"))


@pytest.fixture(scope="module")
def reader() -> Iterator[FileReader]:
    reader = FileReader()
    yield reader
    reader.close()


def test_every_folder_ends_as_ready_or_refused(seeds: hostile.Seeds, reader: FileReader) -> None:
    """Within 5 s of CPU time each, and 256 MiB for all; one in SAMPLE by the controller's reader, too."""
    outcomes: Counter[str] = Counter()
    peak = hostile.peak_memory() + hostile.MEMORY_BYTES
    for seed in range(COUNT):
        with hostile.drawn(seeds, seed) as case:
            try:
                found = hostile.outcome(case, hostile.in_this_process(seeds, case), peak)
                if seed % SAMPLE == 0:
                    limits = hostile.limits_of(seeds)
                    read = lambda: reader.read_now(case.model, case.base, limits, Path)  # noqa: B023, E731
                    assert hostile.outcome(case, read, peak) == found
            except hostile.Broken as e:
                pytest.fail(f"seed {seed}, {', '.join(case.changes)}: {e}")
            outcomes[found] += 1
    # changes that no reader reads; and they do not hide what others break
    assert outcomes["Ready"] > COUNT / 20
    assert {"source_unreadable", "path_not_allowed", "adapter_mismatch"} <= set(outcomes)


def test_the_same_seed_draws_the_same_folder(seeds: hostile.Seeds, tmp_path: Path) -> None:
    for seed in range(20):
        first, second = (hostile.draw(seeds, seed, tmp_path / f"{seed}-{n}") for n in (1, 2))
        assert first.changes == second.changes
        held = [
            {p.name: p.read_bytes() for p in sorted((tmp_path / f"{seed}-{n}").iterdir()) if _is_small(p)}
            for n in (1, 2)
        ]
        assert held[0] == held[1]


def _is_small(path: Path) -> bool:
    return not path.is_symlink() and path.is_file() and path.stat().st_size < 1 << 20
