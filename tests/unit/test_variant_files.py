"""Reading BOFT and compressed deltas: each is read exactly, or an error says what is wrong."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from safetensors.numpy import load_file, save_file

from profiler.checkpoint import read_model
from profiler.errors import AdapterError, CheckpointError
from profiler.types import ModelSpec
from profiler.variants import boft
from profiler.variants.held import held_bytes
from profiler.variants.reading import read_manifest, read_variant
from profiler.variants.types import (
    BoftManifest,
    SparseManifest,
    SvdManifest,
    VariantKind,
    VariantSpec,
)
from profiler.variants.verifying import verify
from testkit import checkpoints as make
from testkit.variant_folders import (
    BOFT,
    CONFIG,
    DOWN,
    EMBEDDING,
    LIMITS,
    Edit,
    Q,
    boft_weights,
    described,
    write_boft,
    write_delta,
)

DELTAS = ("sparse_delta", "svd_delta", "differences")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    shapes = make.tensors(CONFIG, qkv_bias=True)
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return read_model(make.write_model(tmp_path_factory.mktemp("base"), CONFIG, weights))


# --- BOFT -------------------------------------------------------------------------------------------------


def test_boft_adapters_are_read(tmp_path: Path, base: ModelSpec) -> None:
    manifest = read_manifest(write_boft(tmp_path), base, LIMITS)
    assert isinstance(manifest, BoftManifest)
    assert manifest.spec.kind is VariantKind.BOFT
    assert manifest.spec.target_modules == ("q_proj", "down_proj")
    facts = manifest.spec.modules["down_proj"]
    assert (facts.factors, facts.block_size, facts.size_bytes) == (2, 4, 4 * (2 * 6 * 16 + 16))
    module = manifest.modules[DOWN]
    assert (module.r.shape, module.s.shape) == ((2, 6, 4, 4), (16, 1))


def test_boft_by_number_of_blocks(tmp_path: Path, base: ModelSpec) -> None:
    """Each module then has a block size of its own."""
    weights = {
        **{f"base_model.model.{Q}.boft_R": np.zeros((1, 2, 8, 8), np.float32)},
        **{f"base_model.model.{Q}.boft_s": np.ones((16, 1), np.float32)},
        **{f"base_model.model.{DOWN}.boft_R": np.zeros((1, 2, 12, 12), np.float32)},
        **{f"base_model.model.{DOWN}.boft_s": np.ones((16, 1), np.float32)},
    }
    changes = {"boft_block_size": 0, "boft_block_num": 2, "boft_n_butterfly_factor": 1}
    spec = read_variant(write_boft(tmp_path, changes, weights), base, LIMITS)
    assert {name: facts.block_size for name, facts in spec.modules.items()} == {"q_proj": 8, "down_proj": 12}


def test_boft_of_older_peft_and_without_its_cuda_extension(tmp_path: Path, base: ModelSpec) -> None:
    """Permutations are ignored; tensors with one factor are read so, whatever the config hoped for."""
    permutation = {f"base_model.model.{Q}.boft_P": np.zeros((1, 16, 16), np.float32)}
    manifest = read_manifest(write_boft(tmp_path, None, {**boft_weights(1), **permutation}), base, LIMITS)
    assert {facts.factors for facts in manifest.spec.modules.values()} == {1}
    assert manifest.spec.weight_bytes == sum(array.nbytes for array in boft_weights(1).values())


@pytest.mark.parametrize("bias", ["all", "boft_only"])
@pytest.mark.parametrize("spelling", ["bias", "base_layer.bias"])
def test_boft_adapters_with_biases_are_read(
    tmp_path: Path, base: ModelSpec, bias: str, spelling: str
) -> None:
    weights = {**boft_weights(), f"base_model.model.{Q}.{spelling}": np.zeros(16, np.float32)}
    manifest = read_manifest(write_boft(tmp_path / "a", {"bias": bias}, weights), base, LIMITS)
    assert manifest.full[f"{Q}.bias"].shape == (16,)
    assert manifest.spec.full_bytes == 64
    with pytest.raises(AdapterError, match="says bias none"):
        read_variant(write_boft(tmp_path / "b", None, weights), base, LIMITS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"boft_block_num": 4}, "exactly one"),
        ({"boft_block_size": 0}, "exactly one"),
        ({"boft_block_size": -4}, "natural"),
        ({"boft_block_size": 5}, "not divisible"),
        ({"boft_block_size": 8}, r"shape \(2, 6, 4, 4\).*\(2, 3, 8, 8\)"),
        ({"boft_n_butterfly_factor": 3}, "shape"),
        ({"boft_n_butterfly_factor": 0}, "from 1"),
        ({"bias": "lora_only"}, "boft_only"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": ["q_proj"]}, "does not name it"),
    ],
)
def test_boft_that_does_not_fit(tmp_path: Path, base: ModelSpec, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(AdapterError, match=words):
        read_variant(write_boft(tmp_path, changes), base, LIMITS)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({f"base_model.model.{Q}.boft_s": np.zeros((15, 1), np.float32)}, r"\(15, 1\)"),
        ({f"base_model.model.{Q}.boft_R": np.zeros((2, 4, 4, 4), np.int8)}, "I8"),
        (
            {f"base_model.model.{Q}.lora_A.weight": np.zeros((4, 16), np.float32)},
            "expected only tensors of a BOFT",
        ),
        ({"base_model.model.model.layers.2.self_attn.q_proj.boft_R": np.zeros((1, 4, 4, 4))}, "only one of"),
        ({f"base_model.model.{Q}.boft_R": np.zeros((3, 4, 4, 4), np.float32)}, r"\(3, 4, 4, 4\)"),
    ],
)
def test_boft_tensors_that_do_not_fit(
    tmp_path: Path, base: ModelSpec, weights: make.Tensors, words: str
) -> None:
    with pytest.raises((AdapterError, CheckpointError), match=f"{words}|2 layers"):
        read_variant(write_boft(tmp_path, None, {**boft_weights(), **weights}), base, LIMITS)


def test_butterflies_need_blocks_in_pairs(tmp_path: Path, base: ModelSpec) -> None:
    """24 inputs are 6 blocks of 4: they pair once (m=2) but not twice (m=3)."""
    with pytest.raises(AdapterError, match="3 butterfly factors"):
        read_variant(write_boft(tmp_path, {"boft_n_butterfly_factor": 3}, boft_weights(3)), base, LIMITS)


@given(key=st.sampled_from([*BOFT, "modules_to_save"]), value=make.JSON)
def test_any_boft_config_is_read_or_an_error(base: ModelSpec, key: str, value: object) -> None:
    with contextlib.suppress(AdapterError):
        boft.parse_config({**BOFT, key: value})


# --- compressed deltas ------------------------------------------------------------------------------------


def test_a_sparse_delta_is_read(tmp_path: Path, base: ModelSpec) -> None:
    folder = write_delta(tmp_path / "d", base)
    manifest = read_manifest(folder, base, LIMITS)
    assert isinstance(manifest, SparseManifest)
    assert (manifest.spec.kind, manifest.spec.bits, manifest.spec.full_bytes) == ("sparse_delta", (4,), 80)
    assert manifest.modules[DOWN].values.shape == (16, 6)
    assert manifest.modules[DOWN].group_size == 24
    assert manifest.full["model.norm.weight"].file == "full.safetensors"
    ref = manifest.full["model.norm.weight"]
    raw = (folder / ref.file).read_bytes()[ref.offset : ref.offset + ref.size_bytes]
    assert np.array_equal(np.frombuffer(raw, np.float32), np.ones(16))
    verify(folder)
    make.verify_values(manifest)


def test_an_embedding_as_a_difference(tmp_path: Path, base: ModelSpec) -> None:
    folder = write_delta(tmp_path / "d", base, "differences")
    manifest = read_manifest(folder, base, LIMITS)
    assert manifest.full.keys() == {"model.layers.1.self_attn.k_proj.bias", "model.norm.weight"}
    change = manifest.differences[EMBEDDING]
    assert (change.codes.dtype, change.codes.shape) == ("I8", (40, 16))
    assert (change.scales.dtype, change.scales.shape) == ("F32", (40,))
    spec = manifest.spec
    assert (spec.replaces_embedding, spec.replaces_head) == (True, False)
    assert spec.full_bytes == 80 + 40 * 16 + 40 * 4
    assert (held_bytes(manifest).embedding_bytes, held_bytes(manifest).head_bytes) == (40 * 16 + 40 * 4, 0)
    raw = (folder / change.codes.file).read_bytes()[change.codes.offset :][: change.codes.size_bytes]
    assert np.array_equal(np.frombuffer(raw, np.int8), np.arange(640).astype(np.int8))
    verify(folder)
    make.verify_values(manifest)


@pytest.mark.parametrize(
    ("part", "tensor", "words"),
    [
        ("codes", np.zeros((40, 16), np.uint8), "to be I8"),
        ("codes", np.zeros((40, 8), np.int8), r"got I8 \(40, 8\)"),
        ("scales", np.zeros(40, np.float16), "to be F32"),
        ("scales", np.zeros((40, 1), np.float32), r"got F32 \(40, 1\)"),
        (None, np.zeros((40, 16), np.float32), "both whole and as a difference"),
    ],
)
def test_a_difference_of_another_form(
    tmp_path: Path, base: ModelSpec, part: str | None, tensor: np.ndarray[Any, Any], words: str
) -> None:
    folder = write_delta(tmp_path / "d", base, "differences")
    file = folder / "full.safetensors"
    tensors = load_file(file)
    tensors[f"{EMBEDDING}.{part}" if part else EMBEDDING] = tensor
    save_file(tensors, file)
    raw = json.loads((folder / "delta.json").read_text())
    raw["files"][file.name] = described(file)
    if part is None:
        raw["full"][EMBEDDING] = {"file": file.name}
    (folder / "delta.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=words):
        read_manifest(folder, base, LIMITS)


def test_a_scale_of_a_difference_is_finite(tmp_path: Path, base: ModelSpec) -> None:
    folder = write_delta(tmp_path / "d", base, "differences")
    file = folder / "full.safetensors"
    tensors = load_file(file)
    tensors[f"{EMBEDDING}.scales"][7] = np.inf
    save_file(tensors, file)
    raw = json.loads((folder / "delta.json").read_text())
    raw["files"][file.name] = described(file)
    (folder / "delta.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"scales has a value that is not finite at \[7\]"):
        make.verify_values(read_manifest(folder, base, LIMITS))


def test_an_svd_delta_is_read(tmp_path: Path, base: ModelSpec) -> None:
    manifest = read_manifest(write_delta(tmp_path / "d", base, "svd_delta"), base, LIMITS)
    assert isinstance(manifest, SvdManifest)
    assert (manifest.spec.bits, manifest.spec.max_rank) == ((16, 3), 3)
    wide, narrow = manifest.modules[Q].groups
    assert (wide.bits, wide.v.codes.shape, wide.v.scales) == (16, (1, 16), None)
    assert (narrow.bits, narrow.rank, narrow.u.codes.shape) == (3, 2, (2, 6))


def test_a_spec_survives_json(tmp_path: Path, base: ModelSpec) -> None:
    adapter = TypeAdapter(VariantSpec)
    for kind in DELTAS:
        spec = read_variant(write_delta(tmp_path / kind, base, kind), base, LIMITS)
        assert adapter.validate_json(adapter.dump_json(spec)) == spec


FIRST, NORM = "layer-00000.safetensors", "model.norm.weight"
IN_FULL = {"file": "full.safetensors", "bits": 8}


def put(*path: Any, value: Any) -> Edit:
    def edit(raw: dict[str, Any]) -> None:
        for key in path[:-1]:
            raw = raw[key]
        raw[path[-1]] = value

    return edit


def drop(*path: Any) -> Edit:
    def edit(raw: dict[str, Any]) -> None:
        for key in path[:-1]:
            raw = raw[key]
        del raw[path[-1]]

    return edit


@pytest.mark.parametrize(
    ("kind", "edit", "words"),
    [
        ("sparse_delta", put("format", value="gguf"), "format"),
        ("sparse_delta", put("version", value=4), "version 1 to 3, got 4"),
        ("sparse_delta", put("version", value=3), "expected differences to map names"),
        ("differences", put("version", value=2), "does not list"),
        ("differences", drop("differences", EMBEDDING), "does not list"),
        ("differences", put("differences", EMBEDDING, "bits", value=4), "to be 8, got 4"),
        ("differences", put("differences", EMBEDDING, "file", value="z"), "missing in files"),
        ("differences", put("differences", EMBEDDING, "file", value=FIRST), "expected a tensor"),
        ("differences", put("differences", NORM, value=IN_FULL), "only embedding and head"),
        ("differences", put("differences", f"{Q}.weight", value=IN_FULL), "only embedding and head"),
        (
            "differences",
            put("full", EMBEDDING, value={"file": "full.safetensors"}),
            "found it elsewhere; copy",
        ),
        ("differences", put("differences", "lm_head.weight", value=IN_FULL), "expected a tensor lm_head"),
        ("sparse_delta", put("version", value=True), "version"),
        ("sparse_delta", put("kind", value="lora"), "kind"),
        ("sparse_delta", put("bits", value=3), "4 or 2"),
        ("sparse_delta", put("bits", value=2), r"\(16, 2\), got U8 \(16, 4\)"),
        ("sparse_delta", put("group_size", value=12), "group_size"),
        ("sparse_delta", put("group_size", value=16), "24 inputs"),
        ("sparse_delta", put("base", value={"fingerprint": "0" * 64}), "made from the base"),
        ("sparse_delta", put("base", value={"fingerprint": "x"}), "hexadecimal"),
        ("sparse_delta", drop("files", "full.safetensors"), "missing in files"),
        ("sparse_delta", put("files", "full.safetensors", "size_bytes", value=7), "says 7"),
        ("sparse_delta", put("files", "full.safetensors", "sha256", value="zz"), "sha256"),
        (
            "sparse_delta",
            put("files", "../x.safetensors", value={"size_bytes": 1, "sha256": "0" * 64}),
            "names of",
        ),
        (
            "sparse_delta",
            put("files", "y.safetensors", value={"size_bytes": 1, "sha256": "0" * 64}),
            "found none",
        ),
        ("sparse_delta", drop("modules", Q), "does not list"),
        ("sparse_delta", drop("full", "model.norm.weight"), "does not list"),
        ("sparse_delta", put("modules", Q, "file", value="full.safetensors"), "expected a tensor"),
        (
            "sparse_delta",
            put("modules", "lm_head", value={"file": "full.safetensors"}),
            "modules of hidden layers that variants can adapt",
        ),
        (
            "sparse_delta",
            put("full", "lm_head.weight", value={"file": "full.safetensors"}),
            "found it elsewhere",
        ),
        ("svd_delta", put("group_size", value=64), "128"),
        ("svd_delta", put("modules", Q, "groups", value=[]), "groups of ranks"),
        ("svd_delta", put("modules", Q, "groups", 0, "bits", value=5), "bits"),
        ("svd_delta", put("modules", Q, "groups", 0, "rank", value=10**9), "rank"),
        ("svd_delta", put("modules", Q, "groups", 1, "rank", value=3), r"\(3, 6\)"),
        ("svd_delta", put("modules", Q, "groups", 1, "bits", value=16), "F16"),
    ],
)
def test_a_delta_that_does_not_do(tmp_path: Path, base: ModelSpec, kind: str, edit: Edit, words: str) -> None:
    with pytest.raises((CheckpointError, AdapterError), match=words):
        read_variant(write_delta(tmp_path / "d", base, kind, edit), base, LIMITS)


@pytest.mark.parametrize(
    "name", [f"{Q}.weight", "model.layers.7.input_layernorm.weight", "model.layers.0.mlp.up_proj.bias", "x"]
)
def test_files_that_cannot_be_replaced_are_named(tmp_path: Path, base: ModelSpec, name: str) -> None:
    folder = write_delta(tmp_path / "d", base)
    save_file({name: np.zeros((16, 16), np.float32)}, folder / "more.safetensors")
    raw = json.loads((folder / "delta.json").read_text())
    raw["files"]["more.safetensors"] = described(folder / "more.safetensors")
    raw["full"][name] = {"file": "more.safetensors"}
    (folder / "delta.json").write_text(json.dumps(raw))
    with pytest.raises(AdapterError, match="cannot be replaced"):
        read_variant(folder, base, LIMITS)


def test_a_folder_holds_one_variant(tmp_path: Path, base: ModelSpec) -> None:
    folder = write_delta(tmp_path / "d", base)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="both"):
        read_variant(folder, base, LIMITS)
    with pytest.raises(CheckpointError, match=r"found it in its folder d; register that folder: .*/d`"):
        read_variant(tmp_path, base, LIMITS)


def test_a_base_without_fingerprint_is_refused(tmp_path: Path, base: ModelSpec) -> None:
    import dataclasses

    with pytest.raises(AdapterError, match="register it again"):
        read_variant(write_delta(tmp_path / "d", base), dataclasses.replace(base, fingerprint=""), LIMITS)


@pytest.fixture(scope="module")
def deltas(base: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("deltas")
    made = {kind: write_delta(root / kind, base, kind) for kind in DELTAS}
    return {**made, "boft": write_boft(root / "boft")}


@given(data=st.data())
def test_any_value_in_delta_json_is_read_or_an_error(
    base: ModelSpec, deltas: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    kind = data.draw(st.sampled_from(DELTAS))
    raw = json.loads((deltas[kind] / "delta.json").read_text())
    paths: list[tuple[str, ...]] = [(key,) for key in raw] + [
        (key, inner) for key in raw if isinstance(raw[key], dict) for inner in raw[key]
    ]
    paths += [("modules", Q, "file"), ("files", "full.safetensors", "size_bytes"), ("base", "fingerprint")]
    put(*data.draw(st.sampled_from(paths)), value=data.draw(make.JSON))(raw)
    with damaged(deltas[kind], tmp_path_factory) as folder:
        (folder / "delta.json").write_text(json.dumps(raw))
        with contextlib.suppress(AdapterError, CheckpointError):
            read_variant(folder, base, LIMITS)
        with contextlib.suppress(CheckpointError):
            verify(folder)


@given(data=st.data())
def test_any_damaged_bytes_are_read_or_an_error(
    base: ModelSpec, deltas: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    kind = data.draw(st.sampled_from(sorted(deltas)))
    with damaged(deltas[kind], tmp_path_factory) as folder:
        path = folder / data.draw(st.sampled_from(sorted(p.name for p in folder.iterdir())))
        raw = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(0, 3))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
        with contextlib.suppress(AdapterError, CheckpointError):
            make.verify_values(read_manifest(folder, base, LIMITS))


@contextlib.contextmanager
def damaged(folder: Path, factory: pytest.TempPathFactory) -> Any:
    copy = factory.mktemp("damaged") / "v"
    shutil.copytree(folder, copy)
    yield copy
    shutil.rmtree(copy.parent)


# --- fingerprints -----------------------------------------------------------------------------------------


def test_a_fingerprint_is_of_the_weights_not_of_the_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    weights = {
        n: rng.standard_normal(s).astype(np.float32) for n, s in make.tensors(CONFIG, qkv_bias=True).items()
    }
    plain = read_model(make.write_model(tmp_path / "a", CONFIG, weights)).fingerprint
    again = make.write_model(
        tmp_path / "b",
        {**CONFIG, "rope_theta": 1.0, "max_position_embeddings": 9, "torch_dtype": "bfloat16"},
        weights,
    )
    (again / "model.safetensors").unlink()
    names = sorted(weights)
    for file, held in (("x.safetensors", names[::2]), ("y.safetensors", names[1::2])):
        save_file({name: weights[name] for name in held}, again / file)
    where = {
        name: file
        for file, held in (("x.safetensors", names[::2]), ("y.safetensors", names[1::2]))
        for name in held
    }
    (again / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert read_model(again).fingerprint == plain
    trained = {name: weight * np.float32(1.001) for name, weight in weights.items()}
    assert read_model(make.write_model(tmp_path / "c", CONFIG, trained)).fingerprint != plain
    one = {**weights, "model.norm.weight": weights["model.norm.weight"] + 1}
    assert read_model(make.write_model(tmp_path / "d", CONFIG, one)).fingerprint != plain
    assert set(load_file(tmp_path / "d" / "model.safetensors")) == set(weights)
