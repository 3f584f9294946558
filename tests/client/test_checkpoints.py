"""`ostinato compress` and `ostinato merge`, on real folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controlplane.cli import main as cli_main
from profiler.checkpoint import read_model
from profiler.variants.reading import read_variant
from profiler.variants.types import VariantKind, VariantLimits
from testkit import random_variants as make
from testkit.client.fake_api import FakeApi, answer, model
from testkit.random_adapters import RandomLora

Cli = Callable[..., tuple[int, str, str]]
COMPRESS = ["compress", "BASE", "BASE"]


@pytest.fixture
def cli(api: FakeApi, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("OSTINATO_URL", api.url)

    def run(*argv: Any) -> tuple[int, str, str]:
        code = cli_main.run([str(arg) for arg in argv])
        return code, *capfd.readouterr()

    return run


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make.write_tiny_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def tuned(base: Path) -> Path:
    return make.write_tuned(base, base.parent / "tuned", 1)


@pytest.mark.parametrize(
    ("options", "kind", "bits"),
    [
        (("--method", "magnitude"), VariantKind.SPARSE_DELTA, (4,)),
        (("--method", "sparse", "--bits", "2", "--group-size", "8"), VariantKind.SPARSE_DELTA, (2,)),
        (("--method", "low-rank", "--ratio", "1/2"), VariantKind.SVD_DELTA, (16,)),
        (("--method", "low-rank", "--budget", "0.5"), VariantKind.SVD_DELTA, (16,)),
    ],
)
def test_a_compressed_delta_is_merged(
    cli: Cli, tmp_path: Path, base: Path, tuned: Path, options: Any, kind: VariantKind, bits: Any
) -> None:
    code, out, err = cli("compress", base, tuned, "--out", tmp_path / "delta", *options)
    assert code == 0, err
    assert "ostinato register" in out
    assert "Layer error" in out
    assert "without embeddings" in out
    assert "layer 0 of 2: model.layers.0.self_attn.q_proj" in err
    spec = read_variant(tmp_path / "delta", read_model(base), VariantLimits(1))
    assert (spec.kind, spec.bits) == (kind, bits)
    code, out, err = cli(
        "merge", "--base", base, "--variant", tmp_path / "delta", "--to", tmp_path / "m", "--json"
    )
    assert (code, err) == (0, "")
    assert json.loads(out).keys() == {"folder", "base", "variant"}
    assert read_model(tmp_path / "m").fingerprint != read_model(base).fingerprint


def test_compress_prints_one_document(cli: Cli, tmp_path: Path, base: Path, tuned: Path) -> None:
    code, out, err = cli("--json", "compress", base, tuned, tmp_path / "delta", "--method", "magnitude")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document.keys() == {
        *("folder", "method", "kind", "weightBytes", "ratio", "ratioWithoutEmbeddings", "layerErrors"),
        *("seconds", "peakMemoryBytes", "peakDeviceBytes", "warnings", "quality", "tried", "lossless"),
    }
    spec = read_variant(tmp_path / "delta", read_model(base), VariantLimits(1))
    assert document["weightBytes"] == spec.weight_bytes
    assert document["layerErrors"].keys() == set(spec.target_modules)


def test_compress_can_be_forced_onto_a_base_that_seems_another(cli: Cli, tmp_path: Path, base: Path) -> None:
    other = make.write_tiny_base(tmp_path / "other", 7)
    command = ("compress", base, other, tmp_path / "delta", "--method", "magnitude")
    code, _, err = cli(*command)
    assert code != 0
    assert "the checkpoint that the fine-tune was trained from, or --force" in err
    assert cli(*command, "--force")[0] == 0


def test_compress_warns_on_stderr(cli: Cli, tmp_path: Path, base: Path) -> None:
    far = make.write_tuned(base, tmp_path / "far", 1, 0.3)
    code, out, err = cli("compress", base, far, tmp_path / "delta", "--method", "magnitude")
    assert code == 0
    assert "Warning: the linear layers" in err
    assert "Warning" not in out


def test_an_unserved_method_is_reported(cli: Cli, tmp_path: Path, base: Path, tuned: Path) -> None:
    code, out, err = cli("compress", base, tuned, tmp_path / "plain", "--method", "round-to-nearest")
    assert code == 0, err
    assert "plain checkpoint" in out
    assert read_model(tmp_path / "plain").num_layers == 2


def test_compress_packs_files(cli: Cli, tmp_path: Path, base: Path, tuned: Path) -> None:
    packed = ("--method", "magnitude", "--lossless", "--storage-mb-per-s", "1e-6")
    code, out, err = cli("compress", base, tuned, tmp_path / "delta", *packed)
    assert code == 0, err
    assert "Lossless" in out
    assert "3 of 3 files compressed" in out
    assert "MB/s (as given)" in out
    assert len(list((tmp_path / "delta").glob("*.safetensors.zst"))) == 3
    assert read_variant(tmp_path / "delta", read_model(base), VariantLimits(1)).bits == (4,)


def test_merge_finds_models_by_name(cli: Cli, api: FakeApi, tmp_path: Path, base: Path) -> None:
    lora = make.write(base, tmp_path / "lora", RandomLora("l", 4, 1))
    api.script("GET /models/v1", answer(model("v1", base="smol", adapter=str(lora), path=str(lora))))
    api.script("GET /models/smol", answer(model("smol", path=str(base))))
    code, out, err = cli("merge", "v1", "--to", tmp_path / "merged")
    assert code == 0, err
    assert "ostinato register NAME" in out
    assert read_model(tmp_path / "merged").num_layers == 2
    code, _, err = cli("merge", "smol", "--to", tmp_path / "again")
    assert code == 1
    assert "is a base" in err


def test_merge_by_name_where_the_folders_are_not(cli: Cli, api: FakeApi, tmp_path: Path, base: Path) -> None:
    api.script("GET /models/v1", answer(model("v1", base="smol", adapter="/a", path="/nowhere/a")))
    api.script("GET /models/smol", answer(model("smol", path=str(base))))
    code, _, err = cli("merge", "v1", "--to", tmp_path / "merged")
    assert code == 1
    assert "does not exist on this machine" in err
    assert "--base and --variant" in err


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        ([*COMPRESS, "NEW", "--bits", "3"], 2, "4 or 2"),
        ([*COMPRESS, "NEW", "--bits", "4", "--method", "deltamix"], 2, "has no option bits"),
        ([*COMPRESS, "NEW", "--method", "deltamix", "--budget", "0"], 2, "above 0"),
        ([*COMPRESS, "NEW", "--method", "deltamix", "--ratio", "1/0"], 2, "such as 1/16"),
        ([*COMPRESS, "NEW", "--group-size", "12"], 2, "multiple of 8"),
        ([*COMPRESS, "NEW", "--method", "zip"], 2, "deltacompress, deltamix"),
        ([*COMPRESS, "NEW", "--method", "auto", "--evaluation", "BASE"], 2, "largest allowed loss"),
        ([*COMPRESS, "NEW", "--method", "auto", "--max-loss", "1"], 2, "needs a file of tasks"),
        ([*COMPRESS, "NEW", "--max-loss", "1"], 2, "only auto takes max_loss"),
        ([*COMPRESS, "NEW", "--max-loss", "nan"], 2, "'--max-loss': expected a finite number, got nan"),
        (["simulate", "BASE", "--for-slo", "nan"], 2, "Invalid value for '--for-slo'"),
        (["plan", "BASE", "--theta", "nan"], 2, "Invalid value for '--theta'"),
        (["deploy", "m", "--ttft-ms", "inf"], 2, "'--ttft-ms': expected a finite number, got inf"),
        ([*COMPRESS, "NEW", "--storage-mb-per-s", "9"], 2, "together with lossless"),
        ([*COMPRESS, "NEW", "--method", "bitdelta", "--lossless"], 2, "only deltas are packed"),
        ([*COMPRESS, "NEW", "--evaluation", "BASE"], 1, "docs/evaluation.md"),
        ([*COMPRESS, "NEW", "--device", "abacus"], 2, "cannot compute on 'abacus'"),
        (COMPRESS, 2, "folder to write to"),
        ([*COMPRESS, "NEW", "--out", "NEW"], 2, "one folder to write to"),
        (["compress", "BASE", "NEW/none", "NEW"], 1, "config.json"),
        ([*COMPRESS, "BASE"], 1, "exists already"),
        ([*COMPRESS, "NEW", "--method", "magnitude"], 1, "the base itself"),
        (["merge", "--to", "NEW"], 2, "either"),
        (["merge", "v1", "--base", "BASE", "--variant", "BASE", "--to", "NEW"], 2, "either"),
        (["merge", "--base", "BASE", "--variant", "BASE", "--to", "NEW"], 1, "expected adapter_config.json"),
    ],
)
def test_mistakes_are_explained(
    cli: Cli, tmp_path: Path, base: Path, argv: list[str], code: int, words: str
) -> None:
    places = {"BASE": str(base), "NEW": str(tmp_path / "new")}
    for name, place in places.items():
        argv = [arg.replace(name, place) for arg in argv]
    ended, _, err = cli(*argv)
    assert ended == code
    assert words in err
    assert not (tmp_path / "new").exists()
