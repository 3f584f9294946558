"""Files are opened where a process may read, whatever links are put in their place, and whenever."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from profiler import inside
from profiler.checkpoint import read_model
from profiler.errors import CheckpointError
from profiler.types import ModelSpec
from profiler.variants.reading import read_manifest
from profiler.variants.types import VariantLimits
from profiler.variants.verifying import (
    read_file,
    read_stretches,
    tensors_of,
    verify_data,
)
from testkit import checkpoints


@pytest.fixture
def confined(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "root"
    root.mkdir()
    inside.confine([root])
    yield root
    inside.confine([])


def spec_of(root: Path) -> ModelSpec:
    return read_model(checkpoints.write_model(root / "base"))


def exchange(path: Path, outside: Path) -> None:
    """A link to the same file elsewhere in the place of a file."""
    outside.mkdir(exist_ok=True)
    path.rename(outside / path.name)
    path.symlink_to(outside / path.name)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_base_with_a_file_exchanged_for_a_link_is_refused(
    confined: Path, tmp_path: Path, name: str
) -> None:
    spec_of(confined)
    exchange(confined / "base" / name, tmp_path / "outside")
    with pytest.raises(CheckpointError, match="outside the folders"):
        read_model(confined / "base")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_variant_with_a_file_exchanged_for_a_link_is_refused(
    confined: Path, tmp_path: Path, name: str
) -> None:
    spec, folder = spec_of(confined), checkpoints.write_adapter(confined / "v1")
    exchange(folder / name, tmp_path / "outside")
    with pytest.raises(CheckpointError, match="outside the folders"):
        read_manifest(folder, spec, VariantLimits(16))


def test_a_file_that_is_exchanged_between_headers_and_bytes_is_refused(
    confined: Path, tmp_path: Path
) -> None:
    """An engine's order of reading: headers first, layers later."""
    spec, folder = spec_of(confined), checkpoints.write_adapter(confined / "v1")
    manifest = read_manifest(folder, spec, VariantLimits(16))
    exchange(folder / "adapter_model.safetensors", tmp_path / "outside")
    file, into = manifest.files[0], memoryview(bytearray(1 << 20))
    for read in (
        lambda: read_file(folder, file),
        lambda: read_stretches(folder, file, tensors_of(manifest), into),
        lambda: verify_data(manifest),
    ):
        with pytest.raises(CheckpointError, match="outside the folders"):
            read()


def test_a_folder_that_was_exchanged_for_a_link(confined: Path, tmp_path: Path) -> None:
    spec_of(confined)
    (confined / "base").rename(tmp_path / "moved")
    (confined / "base").symlink_to(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="outside the folders"):
        read_model(confined / "base")


def test_links_among_the_roots_are_read(confined: Path, tmp_path: Path) -> None:
    spec = spec_of(confined)
    exchange(confined / "base/model.safetensors", confined / "blobs")
    assert read_model(confined / "base") == spec


def test_a_root_may_be_a_link_on_this_machine(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "models").symlink_to(tmp_path / "disk")
    spec = spec_of(tmp_path / "models")
    inside.confine([tmp_path / "models"])
    try:
        assert read_model(tmp_path / "models/base") == spec
    finally:
        inside.confine([])


def test_a_special_file_is_refused_at_once(tmp_path: Path) -> None:
    """A pipe would never end, a device neither."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(CheckpointError, match="to be a regular file"):
            inside.open_file(path)
    with pytest.raises(FileNotFoundError):
        inside.open_file(tmp_path / "none")


def test_a_folder_of_too_many_files(tmp_path: Path) -> None:
    for n in range(6):
        (tmp_path / f"{n}").touch()
    assert inside.link_outside(tmp_path, [tmp_path], 6) is None
    with pytest.raises(CheckpointError, match="more than 5 files"):
        inside.link_outside(tmp_path, [tmp_path], 5)
