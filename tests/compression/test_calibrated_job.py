"""A calibrated job: each layer is compressed for what the compressed layers before it give it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from profiler.errors import CheckpointError
from profiler.variants.types import VariantKind
from testkit import random_variants as make
from testkit.compression.word_models import write_gemma3_pair, write_pair, write_texts
from tests.compression.test_going_on import contents, hidden, stop_at
from workers.compression.calibration.texts import read_texts
from workers.compression.choose import MethodName, Options, method_of
from workers.compression.job import CalibrationOptions, Job, compress
from workers.compression.methods.magnitude import magnitude
from workers.compression.types import Compressed, Method, Problem
from workers.deltas.merge import merge

SERVED = {
    MethodName.deltacompress: VariantKind.SPARSE_DELTA,
    MethodName.deltamix: VariantKind.SVD_DELTA,
    MethodName.delta_come: VariantKind.SVD_DELTA,
    MethodName.low_rank: VariantKind.SVD_DELTA,
    MethodName.magnitude: VariantKind.SPARSE_DELTA,
    MethodName.sparse_gpt: None,
    MethodName.bitdelta: None,
    MethodName.round_to_nearest: None,
}


FAMILIES = {"llama": write_pair, "gemma3": write_gemma3_pair}


@pytest.fixture(scope="module", params=FAMILIES)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return FAMILIES[request.param](tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> CalibrationOptions:
    return CalibrationOptions(write_texts(tmp_path_factory.mktemp("texts") / "texts.txt"), 16, 40)


def spied(inner: Method, problems: dict[str, Problem]) -> Method:
    """The method, which keeps what it was given."""

    def step(problem: Problem) -> Compressed:
        problems[problem.name] = problem
        return inner.step(problem)

    return replace(inner, calibrated=True, step=step)


def inputs_by_transformers(folder: Path, texts: Path, rows: int, tokens: int) -> dict[str, torch.Tensor]:
    """X [tokens, in] of every linear layer of a whole model, over the texts one after another."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    seen: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(
                lambda _, given, name=name: seen.setdefault(name, []).append(given[0][0])
            )
    with torch.no_grad():
        for row in read_texts(texts, folder, rows, tokens).rows:
            model(row[None])
    return {name: torch.cat(rows) for name, rows in seen.items()}


def test_inputs_are_those_of_the_compressed_model(
    tmp_path: Path, models: tuple[Path, Path], texts: CalibrationOptions
) -> None:
    """A layer's inputs during compression equal those in the finished model, run whole."""
    base, tuned = models
    problems: dict[str, Problem] = {}
    result = compress(Job(base, tuned, tmp_path / "delta", spied(magnitude(2), problems), texts))
    merge(base, tmp_path / "delta", tmp_path / "rounded")
    # The norms of the delta are the fine-tune's, as in calibration, and its embedding all but.
    table, own = "model.embed_tokens.weight", dict(make.weights(tuned))
    make.copy_model(tmp_path / "rounded", tmp_path / "merged", lambda n, w: own[n] if n == table else w)
    assert texts.file is not None
    found = inputs_by_transformers(tmp_path / "merged", texts.file, texts.rows, texts.tokens)
    assert found.keys() == problems.keys()
    new, old, exact = (dict(make.weights(f)) for f in (tmp_path / "merged", base, tuned))
    errors: dict[str, list[float]] = {}
    for name, x in found.items():
        inputs = problems[name].inputs
        assert inputs is not None
        assert inputs.tokens == len(x)
        assert torch.allclose(inputs.gram, x.T @ x / len(x), rtol=1e-3, atol=1e-4), name
        lost = ((new[f"{name}.weight"] - exact[f"{name}.weight"]) @ x.T).square().sum()
        whole = ((old[f"{name}.weight"] - exact[f"{name}.weight"]) @ x.T).square().sum()
        errors.setdefault(name.rpartition(".")[2], []).append(float(lost / whole))
    for kind, values in errors.items():
        assert result.layer_errors[kind] == pytest.approx(sum(values) / len(values), rel=1e-3), kind


@pytest.mark.parametrize("name", SERVED, ids=str)
def test_every_method_is_written_and_read_back(
    tmp_path: Path, models: tuple[Path, Path], texts: CalibrationOptions, name: MethodName
) -> None:
    ratio = 0.5 if name in (MethodName.deltamix, MethodName.delta_come, MethodName.low_rank) else None
    method = method_of(Options(name, ratio=ratio))
    result = compress(Job(*models, tmp_path / "out", method, texts))
    assert (result.spec.kind if result.spec else None) == SERVED[name]
    whole_weights = name is MethodName.sparse_gpt  # 2:4 of the weights loses more than the whole delta
    assert (max(result.layer_errors.values()) > 1) == whole_weights
    assert any("differ more from the fine-tune" in warning for warning in result.warnings) == whole_weights
    assert 0 < result.size_bytes - result.table_bytes < result.finetune_bytes


@pytest.mark.parametrize("kind", ["delta", "checkpoint"])
def test_a_calibrated_job_goes_on_to_the_same_bytes(
    tmp_path: Path, models: tuple[Path, Path], texts: CalibrationOptions, kind: str
) -> None:
    def job(out: str) -> Job:
        method = method_of(Options(MethodName.deltacompress))
        return Job(*models, tmp_path / out, method, texts, plain=kind == "checkpoint")

    stop_at(job("out"), "layer 1 of 2: model.layers.1.self_attn.v_proj")
    assert (hidden(tmp_path / "out") / "records" / "layer-00000.json").exists()
    compress(job("out"))
    compress(job("undisturbed"))
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


def test_other_texts_are_another_job(
    tmp_path: Path, models: tuple[Path, Path], texts: CalibrationOptions
) -> None:
    method = method_of(Options(MethodName.deltacompress))
    stop_at(Job(*models, tmp_path / "out", method, texts), "layer 1 of 2")
    fewer = CalibrationOptions(texts.file, 8, 40)
    with pytest.raises(CheckpointError, match=r"unfinished.*calibration [0-9a-f]{12}\.\.\. \(now"):
        compress(Job(*models, tmp_path / "out", method, fewer))
