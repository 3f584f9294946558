"""deltacompress, SparseGPT and round to nearest: their errors, compared with the exact optimum and closed
forms."""

from __future__ import annotations

import itertools
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from profiler.variants.types import VariantKind
from testkit.compression.compression_brute_force import Array, correlated, error_of, least_error, problem
from workers.compression.layer_error import relative_error
from workers.compression.methods.deltacompress import deltacompress
from workers.compression.methods.round_to_nearest import round_to_nearest
from workers.compression.methods.sparse_gpt import sparse_gpt
from workers.compression.types import Compressed, Inputs, Method, Problem
from workers.deltas import sparse

seeds = st.integers(0, 2**31)
widths = st.sampled_from((4, 2))


def code_of(found: Compressed, bits: int) -> sparse.SparseCode:
    assert found.encoded is not None
    parts = found.encoded.parts
    return sparse.SparseCode(parts["values"], parts["indices"], parts["scales"], bits)


def errors(found: Compressed, of: Problem) -> Array:
    """Each row's error, from the weights an engine would multiply with."""
    return error_of((found.weight - of.tuned).double().numpy(), of.gram.double().numpy())


def optimum(found: Compressed, of: Problem, bits: int) -> Array:
    """Each row's least error with the scales that were stored."""
    scales = code_of(found, bits).scales.double().numpy().repeat(of.base.shape[1] // 4, axis=1)
    rows = zip(of.delta.double().numpy(), scales, strict=True)
    return np.array([least_error(row, of.gram.double().numpy(), scale, bits) for row, scale in rows])


# --- against the optimum ----------------------------------------------------------------------------------


@given(bits=widths, refit=st.booleans(), seed=seeds)
def test_nothing_beats_the_optimum(bits: int, refit: bool, seed: int) -> None:
    of = problem(1, 8, seed)
    found = deltacompress(bits, refit=refit).step(of)
    assert errors(found, of)[0] >= optimum(found, of, bits)[0] * (1 - 1e-3) - 1e-12


@given(bits=widths, size=st.floats(0.01, 100), seed=seeds)
def test_the_result_is_the_optimum_when_all_inputs_count_alike(bits: int, size: float, seed: int) -> None:
    """The gain of keeping a weight grows with its magnitude then, and no error can be made up for."""
    of = problem(1, 8, seed, size * torch.eye(8))
    found = deltacompress(bits, refit=False).step(of)
    assert errors(found, of) == pytest.approx(optimum(found, of, bits), rel=5e-3)


@given(bits=widths, seed=seeds)
def test_independent_inputs_have_a_closed_form(bits: int, seed: int) -> None:
    """The two of four weights with the largest w^2 h are kept, and rounded to nearest; h is damped."""
    sizes = torch.rand(16, generator=torch.Generator().manual_seed(seed)) + 0.1
    of = problem(4, 16, seed, sizes.diag())
    found = deltacompress(bits, refit=False).step(of)
    importance = (of.delta * (sizes + 0.01 * sizes.mean()).sqrt()).abs().view(4, -1, 4)
    kept = importance >= importance.topk(2, dim=2).values[:, :, 1:]
    scale = (of.delta.abs().amax(dim=1, keepdim=True) * 2 / (2**bits - 1)).half().float()
    half = 2 ** (bits - 1)
    expected = (of.delta * kept.view(4, 16) / scale).round().clamp(-half, half - 1) * scale
    assert torch.equal(sparse.decode(code_of(found, bits)), expected)


@pytest.mark.parametrize(("bits", "factor"), [(4, 2.0), (2, 2.0)])
def test_the_result_is_near_the_optimum_for_correlated_inputs(bits: int, factor: float) -> None:
    """In the median over 60 rows of 8 weights, with the same scales. Pruning by magnitude is not."""
    ours, by_magnitude = [], []
    for seed in range(60):
        of = problem(1, 8, 7 * seed)
        found = deltacompress(bits, refit=False).step(of)
        best = optimum(found, of, bits)[0]
        ours.append(errors(found, of)[0] / best)
        pruned = sparse.decode(sparse.encode(of.delta, bits)) - of.delta
        by_magnitude.append(error_of(pruned.double().numpy(), of.gram.double().numpy())[0] / best)
    assert 1 <= statistics.median(ours) < factor < statistics.median(by_magnitude)


# --- against pruning by magnitude -------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "seed"), itertools.product((4, 2), range(5)))
def test_the_method_loses_less_than_magnitude_for_correlated_inputs(bits: int, seed: int) -> None:
    of = problem(32, 128, 100 + seed)
    by_magnitude = relative_error(of, of.base + sparse.decode(sparse.encode(of.delta, bits)))
    plain, refitted = (
        relative_error(of, deltacompress(bits, None, r).step(of).weight) for r in (False, True)
    )
    assert refitted < plain < by_magnitude


# --- fitting the scales -----------------------------------------------------------------------------------


@given(bits=widths, grouped=st.booleans(), seed=seeds)
def test_fitting_the_scales_never_hurts(bits: int, grouped: bool, seed: int) -> None:
    of, group = problem(4, 32, seed), 8 if grouped else None
    plain, fitted = (deltacompress(bits, group, refit).step(of) for refit in (False, True))
    assert bool((errors(fitted, of) <= errors(plain, of) * (1 + 1e-3)).all())


@pytest.mark.parametrize(("bits", "share"), [(4, 0.97), (2, 0.75)])
def test_fitting_the_scales_pays_on_other_inputs_too(bits: int, share: float) -> None:
    """Errors on inputs of the same kind that calibration has not seen."""
    x = torch.linalg.cholesky(correlated(128, 1).double()).float()
    tokens = torch.randn(2, 128, 1024, generator=torch.Generator().manual_seed(2))
    seen, other = (x @ sample @ sample.T @ x.T / 1024 for sample in tokens)
    of = problem(64, 128, 3, seen)
    plain, fitted = (
        error_of(
            (deltacompress(bits, None, refit).step(of).weight - of.tuned).double().numpy(),
            other.double().numpy(),
        )
        for refit in (False, True)
    )
    assert fitted.sum() < share * plain.sum()


@given(bits=widths, seed=seeds)
def test_a_rows_scale_is_the_least_squares_fit(bits: int, seed: int) -> None:
    of = problem(4, 32, seed)
    code = code_of(deltacompress(bits).step(of), bits)
    ones = sparse.SparseCode(code.values, code.indices, torch.ones_like(code.scales), bits)
    root = np.linalg.cholesky(of.gram.double().numpy() + 1e-12 * np.eye(32))  # |v X|^2 / tokens = |v root|^2
    for steps, delta, scale in zip(sparse.decode(ones), of.delta, code.scales, strict=True):
        q, d = (v.double().numpy() @ root for v in (steps, delta))
        best, *_ = np.linalg.lstsq(q[:, None], d, rcond=None)
        assert float(scale) == pytest.approx(float(best[0]), rel=2e-3)


def test_groups_scales_come_near_the_joint_fit() -> None:
    """All groups' scales of a row at once, by least squares."""
    of = problem(8, 32, 5)
    found = deltacompress(4, 8).step(of)
    code = code_of(found, 4)
    ones = sparse.decode(sparse.SparseCode(code.values, code.indices, torch.ones_like(code.scales), 4))
    root = np.linalg.cholesky(of.gram.double().numpy())
    best = []
    for steps, delta in zip(ones.double().numpy(), of.delta.double().numpy(), strict=True):
        pieces = np.stack([np.where(np.arange(32) // 8 == g, steps, 0) @ root for g in range(4)], axis=1)
        scales, *_ = np.linalg.lstsq(pieces, delta @ root, rcond=None)
        best.append(float(((pieces @ scales - delta @ root) ** 2).sum()))
    assert errors(found, of).sum() <= 1.05 * sum(best)


# --- what is stored ---------------------------------------------------------------------------------------


@given(
    bits=widths,
    grouped=st.booleans(),
    refit=st.booleans(),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    zero=st.floats(0, 1),
    seed=seeds,
)
def test_the_weight_is_the_base_and_what_is_stored(
    bits: int, grouped: bool, refit: bool, dtype: torch.dtype, zero: float, seed: int
) -> None:
    """The test includes fours and rows that equal the base's."""
    made = problem(4, 24, seed, dtype=dtype)
    alike = torch.rand(4, 6, generator=torch.Generator().manual_seed(seed)) < zero
    mask = alike.repeat_interleave(4, dim=1)
    of = Problem(made.name, made.base, torch.where(mask, made.base, made.tuned), made.inputs)
    found = deltacompress(bits, 8 if grouped else None, refit).step(of)
    code = code_of(found, bits)
    assert torch.equal(found.weight, of.base + sparse.decode(code))
    assert found.size_bytes == 4 * (24 * bits // 8 // 2 + 24 // 8 + 2 * (3 if grouped else 1))
    decoded = sparse.decode(code)
    assert bool(((decoded.view(4, 6, 4) != 0).sum(dim=2) <= 2).all())
    if bool((of.delta[0] == 0).all()):
        assert bool((decoded[0] == 0).all())


def test_a_group_of_zeros_is_stored_as_in_the_format() -> None:
    made = problem(2, 16, 1)
    of = Problem(made.name, made.base, made.base.clone(), made.inputs)
    for bits in (4, 2):
        found = deltacompress(bits, 8).step(of)
        code = code_of(found, bits)
        codes, positions = sparse.unpack(code)
        assert bool((codes == 2 ** (bits - 1)).all())
        assert bool((positions == torch.tensor([0, 1] * 4)).all())
        assert bool((code.scales == 0).all())
        assert torch.equal(found.weight, of.base)


def test_dead_inputs_get_no_delta() -> None:
    of, dead = problem(3, 16, 2), [0, 5, 11]
    gram = of.gram.clone()
    gram[dead] = 0
    gram[:, dead] = 0
    found = deltacompress(4).step(Problem(of.name, of.base, of.tuned, Inputs(gram, 128)))
    assert torch.equal(found.weight[:, dead], of.base[:, dead])


def test_methods_describe_themselves() -> None:
    delta, plain = deltacompress(2, 64), deltacompress(2, 64, refit=False)
    assert delta.kind is VariantKind.SPARSE_DELTA
    assert delta.facts == {"bits": 2, "group_size": 64}
    assert delta.calibrated
    assert "2 bits" in delta.name
    assert delta.name != plain.name
    assert (sparse_gpt().kind, sparse_gpt().calibrated) == (None, True)
    assert (round_to_nearest().kind, round_to_nearest().calibrated) == (None, False)


@pytest.mark.parametrize(
    ("method", "columns", "said"),
    [
        (deltacompress(3), 16, "4 or 2 bits"),
        (deltacompress(4), 12, "multiple of 8 columns"),
        (deltacompress(4, 24), 16, "groups of a multiple of 8"),
        (sparse_gpt(4), 12, "multiple of 8 columns"),
    ],
)
def test_layers_that_cannot_be_coded_are_refused(method: Method, columns: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        method.step(problem(2, columns, 1))


def test_a_difference_too_large_for_its_scale_is_refused() -> None:
    of = problem(2, 16, 1)
    with pytest.raises(ValueError, match="below 98000"):
        deltacompress(2).step(Problem(of.name, of.base, of.tuned + 1e6, of.inputs))


# --- on whole weights -------------------------------------------------------------------------------------


@given(bits=widths, seed=seeds)
def test_sparse_gpt_is_deltacompress_from_a_base_of_zeros(bits: int, seed: int) -> None:
    of = problem(4, 16, seed)
    found = sparse_gpt(bits).step(of)
    bare = Problem(of.name, torch.zeros_like(of.base), of.tuned, of.inputs)
    expected = deltacompress(bits, refit=False).step(bare)
    assert torch.equal(found.weight, expected.weight)
    assert found.size_bytes == expected.size_bytes
    assert found.encoded is None


def test_deltas_lose_less_than_whole_weights() -> None:
    of = problem(32, 128, 9)
    assert (
        relative_error(of, deltacompress(4).step(of).weight)
        < 1
        < relative_error(of, sparse_gpt(4).step(of).weight)
    )


@given(bits=st.integers(2, 8), columns=st.integers(1, 40), group=st.sampled_from((1, 8, 16, 128)), seed=seeds)
def test_rounding_to_nearest_finds_the_nearest_step(bits: int, columns: int, group: int, seed: int) -> None:
    """One weight at a time: of the group's steps none is nearer."""
    of = problem(2, columns, seed)
    found = round_to_nearest(bits, group).step(of)
    top = 2**bits - 1
    for row, got in zip(of.tuned.numpy(), found.weight.numpy(), strict=True):
        for start in range(0, columns, group):
            part = row[start : start + group].astype(np.float64)
            span = np.float32(max(part.max(), 0)) - np.float32(min(part.min(), 0))
            scale = float(np.float16(span / np.float32(top)))
            zero = min(round(-min(part.min(), 0) / scale), top)
            steps = (np.arange(top + 1) - zero) * scale
            nearest = np.abs(part[:, None] - steps).min(axis=1)
            assert np.abs(got[start : start + group] - part) == pytest.approx(nearest, abs=1e-3 * scale)


def test_rounding_to_nearest_counts_codes_scales_and_zeros() -> None:
    of = problem(3, 576, 1)
    assert round_to_nearest(4, 128).step(of).size_bytes == 3 * (288 + 5 * 2 + 3)
    assert round_to_nearest(3, 576).step(of).size_bytes == 3 * (216 + 2 + 1)


def test_by_default_a_row_shares_a_scale() -> None:
    """docs/compression.md states this for every method that takes a group size."""
    of = problem(3, 576, 1)
    found = round_to_nearest(4).step(of)
    assert torch.equal(found.weight, round_to_nearest(4, 576).step(of).weight)
    assert found.size_bytes == 3 * (288 + 2 + 1)
    assert deltacompress(4).step(problem(3, 64, 1)).size_bytes == 3 * (16 + 8 + 2)


def test_rounding_zeros_gives_zeros() -> None:
    of = Problem("a", torch.ones(2, 8), torch.zeros(2, 8))
    assert torch.equal(round_to_nearest().step(of).weight, torch.zeros(2, 8))


def test_correlated_inputs_are_correlated() -> None:
    gram = correlated(32, 1)
    unit = gram / gram.diagonal().sqrt().outer(gram.diagonal().sqrt())
    assert float((unit - torch.eye(32)).abs().max()) > 0.5
    assert float(torch.linalg.eigvalsh(gram.double()).min()) > 0
