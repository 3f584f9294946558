"""The contents of a variant's files, read whole at registration: damage anywhere is found and named."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from profiler.errors import AdapterError, CheckpointError
from profiler.types import ModelSpec
from profiler.variants import verifying
from profiler.variants.reading import read_manifest
from profiler.variants.types import Manifest
from profiler.variants.verifying import tensors_of, verify_data
from testkit import checkpoints as make
from testkit.variant_folders import LIMITS, boft_weights, described, random_base, write_boft, write_delta

KINDS = ("lora", "boft", "sparse_delta", "svd_delta")
DELTAS = ("sparse_delta", "svd_delta")
# For each type: the unsigned one of its width, the bits of its exponent, and all others.
WORDS = {
    "F16": (np.uint16, 0x7C00, 0x83FF),
    "BF16": (np.uint16, 0x7F80, 0x807F),
    "F32": (np.uint32, 0x7F800000, 0x807FFFFF),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return random_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def sound(base: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each kind."""
    root = tmp_path_factory.mktemp("sound")
    write_lora(root / "lora", "F32", np.zeros(LORA_VALUES, np.uint32))
    write_boft(root / "boft", None, boft_weights())
    for kind in DELTAS:
        write_delta(root / kind, base, kind)
    return {kind: root / kind for kind in KINDS}


LORA = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["q_proj"], "bias": "none"}
AT = "base_model.model.model.layers.0.self_attn.q_proj"
LORA_SHAPES = {f"{AT}.lora_A.weight": (3, 16), f"{AT}.lora_B.weight": (16, 3)}
LORA_VALUES = 2 * 3 * 16


def write_lora(folder: Path, dtype: str, words: npt.NDArray[np.unsignedinteger], gap: int = 0) -> Path:
    """One pair of matrices with these bits in it. Their data begins `gap` bytes later in the file."""
    header, at, width = {}, 0, words.itemsize
    for name, shape in LORA_SHAPES.items():
        size = shape[0] * shape[1] * width
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(LORA))
    text = json.dumps(header).encode() + b" " * gap
    (folder / "adapter_model.safetensors").write_bytes(make.raw_safetensors(text, words.tobytes()))
    return folder


@contextlib.contextmanager
def damaged(folder: Path, factory: pytest.TempPathFactory) -> Iterator[Path]:
    copy = factory.mktemp("damaged") / "v"
    shutil.copytree(folder, copy)
    yield copy
    shutil.rmtree(copy.parent)


@contextlib.contextmanager
def pieces_of(chunk_bytes: int) -> Iterator[None]:
    """Files are read in pieces of N bytes, so that small ones have several."""
    with mock.patch.object(verifying, "CHUNK_BYTES", chunk_bytes):
        yield


def register(folder: Path, base: ModelSpec) -> None:
    """The steps of registration on a variant's folder."""
    verify_data(read_manifest(folder, base, LIMITS))


@pytest.mark.parametrize("kind", KINDS)
def test_sound_files_are_taken(base: ModelSpec, sound: dict[str, Path], kind: str) -> None:
    for chunk_bytes in (4, 64, 1 << 20):
        with pieces_of(chunk_bytes):
            register(sound[kind], base)


@given(data=st.data(), kind=st.sampled_from(DELTAS))
def test_any_flipped_byte_of_a_delta_is_refused(
    base: ModelSpec,
    sound: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    data: st.DataObject,
) -> None:
    """In its header, in codes, scales or full tensors: its file is named."""
    with damaged(sound[kind], tmp_path_factory) as folder:
        path = data.draw(st.sampled_from(sorted(folder.glob("*.safetensors"))))
        raw = bytearray(path.read_bytes())
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(raw)
        with pytest.raises((CheckpointError, AdapterError)) as refusal:
            register(folder, base)
        assert str(folder) in str(refusal.value)


@given(data=st.data(), kind=st.sampled_from(DELTAS))
def test_flipped_data_of_a_delta_is_a_wrong_checksum(
    base: ModelSpec,
    sound: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    data: st.DataObject,
) -> None:
    """The error is the copy's even if the flipped byte makes a value that is not finite: the training is not
    to blame."""
    manifest = read_manifest(sound[kind], base, LIMITS)
    ref = data.draw(st.sampled_from(sorted(tensors_of(manifest), key=lambda ref: ref.name)))
    with damaged(sound[kind], tmp_path_factory) as folder:
        raw = bytearray((folder / ref.file).read_bytes())
        at = ref.offset + data.draw(st.integers(0, ref.size_bytes - 1))
        raw[at] ^= data.draw(st.just(0x7F) | st.integers(1, 255))
        (folder / ref.file).write_bytes(raw)
        with (
            pieces_of(16),
            pytest.raises(CheckpointError, match=r"corrupt: expected SHA-256.*copy it again") as e,
        ):
            register(folder, base)
        assert ref.file in str(e.value)


@given(
    dtype=st.sampled_from(sorted(WORDS)),
    at=st.integers(0, LORA_VALUES - 1),
    other_bits=st.integers(0, 2**32 - 1),
    chunk_bytes=st.sampled_from([4, 8, 52, 1 << 20]),
    gap=st.integers(0, 9),
)
def test_a_nan_or_infinity_anywhere_in_a_lora_is_refused(
    base: ModelSpec,
    tmp_path_factory: pytest.TempPathFactory,
    dtype: str,
    at: int,
    other_bits: int,
    chunk_bytes: int,
    gap: int,
) -> None:
    """Any sign and mantissa, wherever the data begins: the tensor is named, and the place in it."""
    kind, exponent, others = WORDS[dtype]
    words = np.zeros(LORA_VALUES, kind)
    words[at] = exponent | other_bits & others
    folder = write_lora(tmp_path_factory.mktemp("nan") / "v", dtype, words, gap)
    (name, shape), inside = list(LORA_SHAPES.items())[at // 48], at % 48
    place = f"[{inside // shape[1]}, {inside % shape[1]}]"
    with pieces_of(chunk_bytes), pytest.raises(CheckpointError) as refusal:
        register(folder, base)
    assert f"adapter_model.safetensors: {name} has a value that is not finite at {place}; " in str(
        refusal.value
    )
    shutil.rmtree(folder.parent)


@given(
    dtype=st.sampled_from(sorted(WORDS)),
    bits=st.lists(st.integers(0, 2**32 - 1), min_size=LORA_VALUES, max_size=LORA_VALUES),
    gap=st.integers(0, 9),
)
@example("F16", [0x7BFF, 0xFBFF, 0x0001] + [0] * (LORA_VALUES - 3), 0)  # the largest, and the smallest
def test_finite_values_are_all_taken(
    base: ModelSpec, tmp_path_factory: pytest.TempPathFactory, dtype: str, bits: list[int], gap: int
) -> None:
    kind, exponent, others = WORDS[dtype]
    words = np.array([b & (exponent | others) for b in bits], kind)
    words[(words & kind(exponent)) == exponent] ^= kind(exponent & -exponent)  # one bit of the exponent less
    folder = write_lora(tmp_path_factory.mktemp("finite") / "v", dtype, words, gap)
    with pieces_of(20):
        register(folder, base)
    shutil.rmtree(folder.parent)


@given(data=st.data(), value=st.sampled_from([np.nan, np.inf, -np.inf]))
def test_a_nan_or_infinity_anywhere_in_a_boft_is_refused(
    base: ModelSpec, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, value: float
) -> None:
    weights = boft_weights()
    name = data.draw(st.sampled_from(sorted(weights)))
    weights[name].flat[data.draw(st.integers(0, weights[name].size - 1))] = value
    folder = write_boft(tmp_path_factory.mktemp("nan") / "v", None, weights)
    with pytest.raises(CheckpointError, match=f"{name} has a value that is not finite"):
        register(folder, base)
    shutil.rmtree(folder.parent)


@given(data=st.data(), kind=st.sampled_from(DELTAS), value=st.sampled_from([np.nan, np.inf]))
def test_a_nan_or_infinity_in_a_delta_with_right_checksums_is_refused(
    base: ModelSpec, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, kind: str, value: float
) -> None:
    """A failed compression would write it: in scales, 16-bit factors or full tensors."""
    folder = write_delta(tmp_path_factory.mktemp("nan") / "v", base, kind)
    manifest = read_manifest(folder, base, LIMITS)
    floats = [ref for ref in tensors_of(manifest) if ref.dtype in WORDS]
    ref = data.draw(st.sampled_from(sorted(floats, key=lambda ref: ref.name)))
    tensors = load_file(folder / ref.file)
    tensors[ref.name].flat[data.draw(st.integers(0, tensors[ref.name].size - 1))] = value
    save_file(tensors, folder / ref.file)
    raw = json.loads((folder / "delta.json").read_text())
    raw["files"][ref.file] = described(folder / ref.file)
    (folder / "delta.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=f"{ref.name} has a value that is not finite"):
        register(folder, base)
    shutil.rmtree(folder.parent)


@given(data=st.data(), kind=st.sampled_from(KINDS))
def test_a_file_cut_anywhere_is_refused(
    base: ModelSpec,
    sound: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    data: st.DataObject,
) -> None:
    """The damage is found at registration, or, where the file is cut later, when its bytes are read."""
    manifest = read_manifest(sound[kind], base, LIMITS)
    file = data.draw(st.sampled_from(manifest.files))
    length = data.draw(st.integers(0, file.size_bytes - 1))
    with damaged(sound[kind], tmp_path_factory) as folder:
        path = folder / file.name
        path.write_bytes(path.read_bytes()[:length])
        with pytest.raises(CheckpointError, match=file.name):
            register(folder, base)
        moved = type(manifest)(folder, manifest.spec, manifest.files, manifest.modules, full=manifest.full)  # type: ignore[arg-type]
        for read in (verify_data, make.verify_values):
            with pytest.raises(
                CheckpointError, match=rf"{file.name} no longer has its {file.size_bytes} bytes"
            ):
                read(moved)


@given(data=st.data(), kind=st.sampled_from(KINDS))
def test_registration_and_loading_agree(
    base: ModelSpec,
    sound: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    data: st.DataObject,
) -> None:
    """Both readers refuse the same damaged data."""
    with damaged(sound[kind], tmp_path_factory) as folder:
        manifest = read_manifest(folder, base, LIMITS)
        path = folder / data.draw(st.sampled_from(manifest.files)).name
        raw = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(0, 3))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(bytes(raw) + b"more" * data.draw(st.integers(0, 1)))
        assert (outcome(verify_data, manifest) is None) == (outcome(make.verify_values, manifest) is None)


def outcome(read: object, manifest: Manifest) -> str | None:
    assert callable(read)
    try:
        read(manifest)
    except CheckpointError as e:
        return str(e)
    return None


def test_a_file_that_is_gone_or_grew_is_named(
    base: ModelSpec, sound: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(sound["lora"], tmp_path / "v")
    manifest = read_manifest(folder, base, LIMITS)
    path = folder / "adapter_model.safetensors"
    with path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError, match="no longer has its"):
        verify_data(manifest)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*adapter_model.safetensors: No such file"):
        verify_data(manifest)
