"""DeltaMix's steps against closed forms and brute force."""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from testkit.compression.svd_problems import inputs, problem
from workers.compression import singular
from workers.compression.factors import (
    error_feedback,
    halves,
    quantize_columns,
    quantize_rows,
    rank_hessian,
    reconstruction_target,
    refit_rows,
)
from workers.compression.grids import range_grid, search_grid
from workers.compression.layer_error import output_error, relative_error
from workers.compression.methods.delta_come import delta_come
from workers.compression.methods.deltamix import (
    AS_PUBLISHED,
    Settings,
    column_errors,
    deltamix,
    deltamix_with,
    rank_errors,
    simulate,
)
from workers.compression.types import Inputs, Method, Problem
from workers.deltas import svd

SEEDS = range(5)


def root(gram: torch.Tensor) -> torch.Tensor:
    """Inputs X [in, in] with X X^T = gram."""
    lower: torch.Tensor = torch.linalg.cholesky(gram.double())
    return lower


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_whitened_factors_are_the_best_of_their_rank(shape: tuple[int, int]) -> None:
    """Eckart and Young: what is left are the other singular values of delta X, squared."""
    layer = problem(shape, 0)
    factors = singular.singular_factors(layer.delta, layer.gram, 5)
    left = layer.delta - (factors.u * factors.s) @ factors.v
    values = np.linalg.svd((layer.delta.double() @ root(layer.gram)).numpy(), compute_uv=False)
    assert output_error(left, layer.gram) == pytest.approx((values[5:] ** 2).sum(), rel=1e-4)
    assert factors.energy.tolist() == pytest.approx((values[:5] ** 2).tolist(), rel=1e-4)
    torch.testing.assert_close(factors.v.norm(dim=1), torch.ones(5))


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_plain_factors_are_those_of_the_matrix(shape: tuple[int, int]) -> None:
    layer = problem(shape, 1)
    factors = singular.singular_factors(layer.delta, torch.eye(shape[1]), 6, whiten=False)
    values = torch.linalg.svdvals(layer.delta)
    torch.testing.assert_close(factors.s, values[:6], rtol=1e-4, atol=1e-5)
    left = layer.delta - (factors.u * factors.s) @ factors.v
    assert float(left.square().sum()) == pytest.approx(float(values[6:].square().sum()), rel=1e-4)


@pytest.mark.parametrize("whiten", [True, False])
def test_the_errors_of_ranks_add_up_to_that_of_the_layer(whiten: bool) -> None:
    """Equation 4 by equation 5: U's columns are orthonormal, so nothing is left out."""
    layer = problem((32, 48), 2)
    factors = singular.singular_factors(layer.delta, layer.gram, 32, whiten=whiten)
    tried = simulate(factors.v, (2, 4), error_feedback(layer.gram))
    errors = rank_errors(factors, tried, layer.gram)
    for bits in (2, 4):
        lost = (factors.u * factors.s) @ (tried[bits].values - factors.v)
        assert float(errors[bits].sum()) == pytest.approx(output_error(lost, layer.gram), rel=1e-3)
    assert float(errors[0].sum()) == pytest.approx(output_error(layer.delta, layer.gram), rel=1e-3)


def test_error_feedback_factors_the_inverse() -> None:
    gram = inputs(40, 3).gram
    upper = error_feedback(gram).double()
    assert torch.equal(upper, upper.triu())
    torch.testing.assert_close(upper.T @ upper, gram.double().inverse(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("seed", SEEDS)
def test_target_correction_is_the_least_squares_optimum(seed: int) -> None:
    layer = problem((24, 40), seed)
    v = simulate(singular.singular_factors(layer.delta, layer.gram, 8).v, (2,), error_feedback(layer.gram))
    held, x = v[2].values.double(), root(layer.gram)
    expected = np.linalg.lstsq((held @ x).T.numpy(), (layer.delta.double() @ x).T.numpy())[0].T
    target = reconstruction_target(layer.delta, v[2].values, layer.gram)
    np.testing.assert_allclose(target.numpy(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("seed", SEEDS)
def test_target_correction_never_adds_error(seed: int) -> None:
    layer = problem((24, 40), seed)
    factors = singular.singular_factors(layer.delta, layer.gram, 8, whiten=False)
    v = simulate(factors.v, (3,), error_feedback(layer.gram))[3].values
    corrected = reconstruction_target(layer.delta, v, layer.gram) @ v
    plain = (factors.u * factors.s) @ v
    least = output_error(corrected - layer.delta, layer.gram)
    assert least <= output_error(plain - layer.delta, layer.gram) * (1 + 1e-6)


def brute_force_row(row: torch.Tensor, grid: torch.Tensor, gram: torch.Tensor) -> float:
    """The least error of a row [n] whose values are all among `grid`."""
    values = torch.cartesian_prod(*[grid] * len(row))
    lost = (values - row).double()
    return float(((lost @ gram.double()) * lost).sum(dim=1).min())


@pytest.mark.parametrize("search", [True, False])
def test_rows_come_close_to_the_best_of_all_codes(search: bool) -> None:
    """Rows of 4 values in 2 bits: 256 codes on the grid that was chosen."""
    ratios = []
    for seed in range(30):
        gram = inputs(4, seed).gram
        row = torch.randn(1, 4, generator=torch.Generator().manual_seed(seed))
        coded = quantize_rows(row, torch.tensor([2]), error_feedback(gram), search=search)
        grid = (torch.arange(4.0) - coded.zeros[0, 0]) * coded.scales[0, 0]
        found, best = output_error(coded.values - row, gram), brute_force_row(row[0], grid, gram)
        assert found >= best * (1 - 1e-5)
        ratios.append(found / best)
    assert statistics.median(ratios) < 1.3


def test_rows_are_the_best_of_all_codes_where_inputs_are_independent() -> None:
    gram = torch.diag(torch.tensor([1.0, 9.0, 0.5, 2.0]))
    for seed in range(10):
        row = torch.randn(1, 4, generator=torch.Generator().manual_seed(seed))
        coded = quantize_rows(row, torch.tensor([2]), error_feedback(gram))
        grid = (torch.arange(4.0) - coded.zeros[0, 0]) * coded.scales[0, 0]
        best = brute_force_row(row[0], grid, gram)
        assert output_error(coded.values - row, gram) == pytest.approx(best, rel=1e-4)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_search_is_never_worse_than_the_range(bits: int) -> None:
    values = torch.randn(20, 128, generator=torch.Generator().manual_seed(bits))
    weights, tops = (
        torch.rand(128, generator=torch.Generator().manual_seed(9)) + 0.1,
        torch.full((20, 1), 2.0**bits - 1),
    )
    searched, ranged = search_grid(values, tops, weights), range_grid(values, tops)
    errors = [((g.nearest(values) - values) ** 2 * weights).sum(dim=1) for g in (searched, ranged)]
    assert bool((errors[0] <= errors[1] * (1 + 1e-6)).all())


def best_rank_one(layer: Problem) -> float:
    """The least error in equation 1 of one rank of 2 bits: all codes and zeros of both factors, and the best
    product of their scales, which need not be float16 numbers."""
    x = root(layer.gram)
    wanted = layer.delta.double() @ x
    steps = [torch.arange(4.0, dtype=torch.float64) - zero for zero in range(4)]
    out, into = layer.delta.shape
    us, vs = (torch.cat([torch.tensor(list(product(s, repeat=n))) for s in steps]) for n in (out, into))
    vx = vs.double() @ x
    products = us.double() @ wanted @ vx.T
    norms = us.double().square().sum(dim=1)[:, None] * vx.square().sum(dim=1)
    gains = torch.where(norms > 0, products.clamp_min(0) ** 2 / norms, 0.0)
    return float(wanted.square().sum() - gains.max())


FITTED = Settings(whiten=True, search=True, count_u=True, sweeps=1, damping=0.01)
TINY = replace(FITTED, ratio=80 / 128, widths=(2,))  # a matrix of 2 x 4 has one rank of two bits


@pytest.mark.parametrize(
    ("method", "most"),
    [
        (deltamix_with(TINY), 1.01),
        (deltamix_with(replace(AS_PUBLISHED, ratio=TINY.ratio, widths=(2,), codes_only=False)), 1.5),
        (delta_come(TINY.ratio), 4),
    ],
)
def test_tiny_matrices_come_close_to_the_best_of_all_codes(method: Method, most: float) -> None:
    """The error is never below the bound, and the median of seeds is at most `most` times as large."""
    ratios = []
    for seed in range(20):
        layer = problem((2, 4), seed)
        found = method.step(layer)
        assert found.encoded is not None
        assert found.encoded.facts["groups"] == [{"bits": 2, "rank": 1}]
        error, best = output_error(found.weight - layer.tuned, layer.gram), best_rank_one(layer)
        assert error >= best * (1 - 1e-3)
        ratios.append(error / best)
    assert statistics.median(ratios) < most


def test_columns_make_up_for_those_before() -> None:
    """If two ranks are almost alike, the second, of 8 bits, can undo the rounding error of the first."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(40, 2, generator=generator)
    v = torch.randn(1, 30, generator=generator).repeat(2, 1) + 1e-3 * torch.randn(2, 30, generator=generator)
    coded = quantize_columns(target, [2, 8], rank_hessian(v, torch.eye(30)))
    lost = (coded.values.T - target) @ v
    alone = (quantize_columns(target, [2, 8], torch.eye(2)).values.T - target) @ v
    assert float(lost.square().sum()) < 1e-2 * float(alone.square().sum())


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_fitted_again_are_the_least_squares_optimum(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    delta, u = torch.randn(24, 40, generator=generator), torch.randn(5, 24, generator=generator)
    expected = np.linalg.lstsq(u.T.double().numpy(), delta.double().numpy())[0]
    np.testing.assert_allclose(refit_rows(delta, u).numpy(), expected, rtol=1e-3, atol=1e-4)


def test_the_error_of_a_column_of_u_is_its_share_of_the_energy() -> None:
    """Rounding all columns of U to nearest adds as much error as their ranks are said to."""
    layer = problem((160, 48), 4)
    factors = singular.singular_factors(layer.delta, layer.gram, 12)
    for bits, found in column_errors(factors, (2, 4)).items():
        if bits in (2, 4):
            rounded = quantize_columns(factors.u, [bits] * 12, torch.eye(12)).values.T
            lost = ((rounded - factors.u) * factors.s) @ factors.v
            assert float(found.sum()) == pytest.approx(output_error(lost, layer.gram), rel=1e-3)


@pytest.mark.parametrize("settings", [Settings(), AS_PUBLISHED, Settings(1 / 4, 2)])
def test_the_stored_codes_decode_to_the_weight(settings: Settings) -> None:
    layer = problem((72, 136), 0)
    found = deltamix_with(settings).step(layer)
    assert found.encoded is not None
    parts, groups = found.encoded.parts, []
    for number, facts in enumerate(found.encoded.facts["groups"]):
        v, u = (
            svd.FactorCode(*(parts.get(f"g{number}.{side}{what}") for what in ("", "_scales", "_zeros")))  # type: ignore[arg-type]
            for side in "vu"
        )
        groups.append(svd.GroupCode(facts["bits"], facts["rank"], v, u))
    torch.testing.assert_close(found.weight - layer.base, svd.decode(groups, (72, 136)), atol=1e-6, rtol=0)
    widths = [group.bits for group in groups]
    assert widths == sorted(set(widths), reverse=True)
    assert len(widths) <= settings.max_widths


@cache
def median_error(settings: Settings, shape: tuple[int, int] = (96, 160)) -> float:
    layers = [problem(shape, seed) for seed in SEEDS]
    return statistics.median(relative_error(x, deltamix_with(settings).step(x).weight) for x in layers)


def test_each_step_helps() -> None:
    """Lowers the error over calibration's inputs: the paper's target correction, and what is ours."""
    fitted, default = replace(FITTED, ratio=1 / 8), Settings(1 / 8)
    best = median_error(fitted)
    for without in ("correct_target", "whiten", "search", "count_u"):
        assert best < median_error(replace(fitted, **{without: False}))  # type: ignore[arg-type]
    assert best < median_error(replace(fitted, sweeps=0))
    assert best < median_error(default) < median_error(replace(default, correct_target=False))


def test_more_widths_are_no_worse() -> None:
    assert median_error(Settings(1 / 8, 4)) <= median_error(Settings(1 / 8, 1)) * 1.02


@pytest.mark.parametrize("rank", [1, 4])
def test_an_adapter_is_kept_almost_exactly(rank: int) -> None:
    """A LoRA adapter merged: all of its ranks fit into a ratio of 1/4 in 16 bits, and no others are kept."""
    layer = problem((96, 160), 0, rank=rank)
    found = deltamix(1 / 4).step(layer)
    assert found.encoded is not None
    assert found.encoded.facts["groups"] == [{"bits": 16, "rank": rank}]
    assert relative_error(layer, found.weight) < 1e-5


def test_a_base_itself_is_left_as_it_is() -> None:
    layer = problem((32, 48), 0)
    found = deltamix(1 / 4).step(Problem(layer.name, layer.base, layer.base, layer.inputs))
    torch.testing.assert_close(found.weight, layer.base)


def test_inputs_that_are_always_zero() -> None:
    layer = problem((32, 48), 0)
    gram = layer.gram.clone()
    gram[3], gram[:, 3] = 0, 0
    dead = Problem(layer.name, layer.base, layer.tuned, Inputs(gram, 100))
    none = Problem(layer.name, layer.base, layer.tuned, Inputs(torch.zeros_like(gram), 100))
    assert relative_error(dead, deltamix(1 / 4).step(dead).weight) < 0.5
    assert bool(deltamix(1 / 4).step(none).weight.isfinite().all())


@pytest.mark.parametrize("where", ["base", "tuned", "gram"])
def test_numbers_that_are_none(where: str) -> None:
    layer = problem((32, 48), 0)
    tensors = {"base": layer.base, "tuned": layer.tuned, "gram": layer.gram}
    tensors[where] = tensors[where].clone()
    tensors[where][1, 2] = float("nan")
    bad = Problem(layer.name, tensors["base"], tensors["tuned"], Inputs(tensors["gram"], 9))
    with pytest.raises(ValueError, match=r"expected finite numbers in the .* of model.layers.0.mlp.up_proj"):
        deltamix().step(bad)


def test_a_difference_beyond_float16_is_refused() -> None:
    layer = problem((32, 48), 0)
    with pytest.raises(ValueError, match="expected singular vectors within float16"):
        deltamix(1 / 4).step(Problem(layer.name, layer.base, layer.tuned * 1e7, layer.inputs))
    with pytest.raises(ValueError, match="expected singular vectors within float16"):
        halves(torch.tensor([[1e5]]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": 0.0}, "expected a ratio"),
        ({"max_widths": 0}, "expected max_widths of at least 1"),
        ({"widths": (2, 5)}, "expected widths among 2, 3, 4, 8, 16"),
        ({"widths": ()}, "expected widths among"),
        ({"damping": 0.0}, "expected a damping above 0"),
    ],
)
def test_settings_that_are_none(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(48, 96), (96, 48)])
@pytest.mark.parametrize("tokens", [24, 100])
def test_rounding_in_the_inputs_costs_little(shape: tuple[int, int], tokens: int) -> None:
    """An outlier of 300 times the others, as in down_proj of trained models, and noise of 1e-3 of each
    element, which leaves a Gram matrix of few tokens not positive: what is lost over the true inputs
    hardly grows."""
    layer, exact = problem(shape, 3), inputs(shape[1], 3, tokens).gram.double()
    exact[0] *= 300
    exact[:, 0] *= 300
    sizes = exact.diagonal().sqrt()
    noise = 1e-3 * torch.randn(exact.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    noisy = exact + (noise + noise.T) / 2 * sizes[:, None] * sizes
    assert tokens >= shape[1] or float(torch.linalg.eigvalsh(noisy)[0]) < 0
    truth, seen = (replace(layer, inputs=Inputs(gram.float(), tokens)) for gram in (exact, noisy))
    method = deltamix(1 / 8)
    before, after = (relative_error(truth, method.step(given).weight) for given in (truth, seen))
    assert after <= 1.1 * before
