"""Deltas of version 2, whose files are stored compressed: read as plain ones, or refused with a reason."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from profiler.contents import MAX_WINDOW_BYTES, opened
from profiler.errors import AdapterError, CheckpointError
from profiler.types import ModelSpec
from profiler.variants.reading import read_manifest
from profiler.variants.types import Manifest
from profiler.variants.verifying import read_file, verify, verify_data
from testkit.variant_folders import LIMITS, random_base, store_as, store_compressed, write_delta

KINDS = ("sparse_delta", "svd_delta")
LAYER = "layer-00000.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return random_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def plain(base: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("plain")
    return {kind: write_delta(root / kind, base, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def packed(plain: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("packed")
    return {kind: store_compressed(shutil.copytree(plain[kind], root / kind)) for kind in KINDS}


@contextlib.contextmanager
def copied(folder: Path, factory: pytest.TempPathFactory) -> Iterator[Path]:
    copy = shutil.copytree(folder, factory.mktemp("copied") / "v")
    yield copy
    shutil.rmtree(copy.parent)


def register(folder: Path, base: ModelSpec) -> None:
    """The steps of registration on a variant's folder."""
    verify_data(read_manifest(folder, base, LIMITS))


def refusal_of(folder: Path, base: ModelSpec) -> str | None:
    try:
        register(folder, base)
    except (CheckpointError, AdapterError) as refusal:
        return str(refusal)
    return None


def contents(manifest: Manifest) -> dict[str, bytes]:
    return {file.name: bytes(read_file(manifest.folder, file)) for file in manifest.files}


@pytest.mark.parametrize("kind", KINDS)
def test_a_compressed_delta_reads_as_the_plain_one(
    base: ModelSpec, plain: dict[str, Path], packed: dict[str, Path], kind: str
) -> None:
    register(packed[kind], base)
    verify(packed[kind])
    manifest = read_manifest(packed[kind], base, LIMITS)
    before = read_manifest(plain[kind], base, LIMITS)
    assert (manifest.spec, manifest.modules, manifest.full) == (before.spec, before.modules, before.full)
    assert contents(manifest) == {file.name: (plain[kind] / file.name).read_bytes() for file in before.files}


def test_some_files_may_be_compressed_and_others_not(
    base: ModelSpec, plain: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(plain["svd_delta"], tmp_path / "v")
    raw = json.loads((folder / "delta.json").read_text())
    data = zstandard.ZstdCompressor().compress((folder / LAYER).read_bytes())
    store_as(folder, LAYER, data, raw["files"][LAYER])
    (folder / "delta.json").write_text(json.dumps({**raw, "version": 2}))
    register(folder, base)


@given(data=st.data(), kind=st.sampled_from(KINDS))
def test_a_flipped_byte_is_refused_or_changes_nothing(
    base: ModelSpec,
    packed: dict[str, Path],
    plain: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    data: st.DataObject,
) -> None:
    """A bit of zstd's header means nothing; the copy is still distinguished from the original."""
    with copied(packed[kind], tmp_path_factory) as folder:
        path = data.draw(st.sampled_from(sorted(folder.glob("*.zst"))))
        raw = bytearray(path.read_bytes())
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(raw)
        with pytest.raises(CheckpointError, match=path.name):
            verify(folder)
        refusal = refusal_of(folder, base)
        if refusal is None:
            name = path.name.removesuffix(".zst")
            found = contents(read_manifest(folder, base, LIMITS))
            assert found[name] == (plain[kind] / name).read_bytes()
        else:
            assert str(folder) in refusal


@given(data=st.data(), kind=st.sampled_from(KINDS))
def test_a_compressed_file_cut_anywhere_is_refused(
    base: ModelSpec,
    packed: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    data: st.DataObject,
) -> None:
    """The damage is found at registration, or, where the file is cut later, when its contents are read."""
    manifest = read_manifest(packed[kind], base, LIMITS)
    file = data.draw(st.sampled_from(manifest.files))
    assert file.compressed is not None
    length = data.draw(st.integers(0, file.compressed.size_bytes - 1))
    with copied(packed[kind], tmp_path_factory) as folder:
        path = folder / file.stored_name
        path.write_bytes(path.read_bytes()[:length])
        with pytest.raises(CheckpointError, match=path.name):
            register(folder, base)
        for read in (lambda: read_file(folder, file), lambda: verify_data(_moved(manifest, folder))):
            with pytest.raises(CheckpointError, match=rf"{path.name}.*copy .*again"):
                read()


def _moved(manifest: Manifest, folder: Path) -> Manifest:
    return type(manifest)(folder, manifest.spec, manifest.files, manifest.modules, full=manifest.full)  # type: ignore[arg-type]


@given(junk=st.binary(max_size=400), as_frame=st.booleans())
def test_any_bytes_in_place_of_a_compressed_file_are_refused(
    base: ModelSpec,
    packed: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    junk: bytes,
    as_frame: bool,
) -> None:
    """The sizes and checksums in delta.json agree with the files: the contents decide."""
    with copied(packed["sparse_delta"], tmp_path_factory) as folder:
        raw = json.loads((folder / "delta.json").read_text())
        data = zstandard.ZstdCompressor().compress(junk) if as_frame else junk
        store_as(folder, LAYER, data, raw["files"][LAYER])
        (folder / "delta.json").write_text(json.dumps(raw))
        with pytest.raises(CheckpointError, match=LAYER):
            register(folder, base)


def replaced(packed: Path, folder: Path, data: bytes) -> Path:
    """A copy of the delta with `data` as its first layer's file, which delta.json describes rightly."""
    shutil.copytree(packed, folder)
    raw = json.loads((folder / "delta.json").read_text())
    store_as(folder, LAYER, data, raw["files"][LAYER])
    (folder / "delta.json").write_text(json.dumps(raw))
    return folder


def test_a_frame_of_another_size_is_refused_before_it_is_read(
    base: ModelSpec, packed: dict[str, Path], tmp_path: Path
) -> None:
    """A GiB of zeros in some 30 kB."""
    compressor = zstandard.ZstdCompressor().compressobj(size=1 << 30)
    zeros = bytes(1 << 20)
    bomb = b"".join([*(compressor.compress(zeros) for _ in range(1 << 10)), compressor.flush()])
    folder = replaced(packed["sparse_delta"], tmp_path / "v", bomb)
    with pytest.raises(CheckpointError, match=rf"{LAYER}.zst: expected contents of \d+ bytes.*{1 << 30}"):
        register(folder, base)


def test_a_frame_without_its_size_is_refused(
    base: ModelSpec, packed: dict[str, Path], plain: dict[str, Path], tmp_path: Path
) -> None:
    compressor = zstandard.ZstdCompressor(write_content_size=False)
    data = compressor.compress((plain["sparse_delta"] / LAYER).read_bytes())
    folder = replaced(packed["sparse_delta"], tmp_path / "v", data)
    with pytest.raises(CheckpointError, match="expected contents of"):
        register(folder, base)


def test_a_window_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    """A frame by hand: its descriptor, a window of 2^(10 + 17) bytes, its size in 4 bytes, an empty block."""
    frame = struct.pack("<IBBI", 0xFD2FB528, 0b1000_0000, 17 << 3, 5) + b"\x01\x00\x00"
    assert zstandard.get_frame_parameters(frame).window_size == 1 << 27 > MAX_WINDOW_BYTES
    path = tmp_path / "a.safetensors.zst"
    path.write_bytes(frame)
    with pytest.raises(CheckpointError, match="needs 134217728 bytes of memory"), opened(path, 5):
        pass


def test_more_than_one_frame_is_more_than_the_file(
    packed: dict[str, Path], base: ModelSpec, tmp_path: Path
) -> None:
    more = zstandard.ZstdCompressor().compress(b"more")
    data = (packed["sparse_delta"] / f"{LAYER}.zst").read_bytes() + more
    folder = replaced(packed["sparse_delta"], tmp_path / "v", data)
    with pytest.raises(CheckpointError, match=rf"{LAYER}.zst no longer decompresses to its"):
        register(folder, base)


@pytest.mark.parametrize(
    ("compressed", "words"),
    [
        ({"encoding": "lz4"}, "encoding zstd, got"),
        ("zstd", "encoding zstd, got zstd"),
        (None, "encoding zstd, got None"),
        ({"encoding": "zstd", "size_bytes": "7", "sha256": "0" * 64}, r"size_bytes and sha256 .* of .*zst"),
        ({"encoding": "zstd", "size_bytes": 7, "sha256": "0" * 63}, r"size_bytes and sha256 .* of .*zst"),
        (
            {"encoding": "zstd", "size_bytes": 7, "sha256": "0" * 64},
            r"zst has \d+ bytes, but delta.json says 7",
        ),
    ],
)
def test_an_entry_that_does_not_do(
    base: ModelSpec, packed: dict[str, Path], tmp_path: Path, compressed: Any, words: str
) -> None:
    folder = shutil.copytree(packed["sparse_delta"], tmp_path / "v")
    raw = json.loads((folder / "delta.json").read_text())
    raw["files"][LAYER]["compressed"] = compressed
    (folder / "delta.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=words):
        register(folder, base)


def test_version_1_has_no_compressed_files(base: ModelSpec, packed: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(packed["sparse_delta"], tmp_path / "v")
    raw = json.loads((folder / "delta.json").read_text())
    (folder / "delta.json").write_text(json.dumps({**raw, "version": 1}))
    with pytest.raises(CheckpointError, match=r"expected a file .*\.safetensors in"):
        register(folder, base)


@given(
    piece=st.binary(max_size=500),
    times=st.integers(1, 5000),
    cuts=st.lists(st.integers(0, 1 << 20), max_size=5),
)
def test_contents_are_read_in_pieces_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, piece: bytes, times: int, cuts: list[int]
) -> None:
    data = piece * times
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "a").write_bytes(data)
    (folder / "a.zst").write_bytes(zstandard.ZstdCompressor().compress(data))
    for path, size in ((folder / "a", None), (folder / "a.zst", len(data))):
        with opened(path, size) as source:
            assert source.size_bytes == len(data)
            found = b"".join(source.read(cut) for cut in cuts)
            assert found == data[: sum(cuts)]
            assert found + source.read(len(data)) == data
            assert source.at_end()
    shutil.rmtree(folder)
